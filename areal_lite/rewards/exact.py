"""Verifier that compares texts."""


def exact_reward(completion: str, answer: str) -> float:
    """Return 1.0 if both texts are equal apart from white space around them, else 0.0."""
    return float(completion.strip() == answer.strip())
