"""Verifier by comparison of text."""


def exact_reward(completion: str, answer: str) -> float:
    """1.0 if completion and answer are the same but for white space around them; else 0.0."""
    return float(completion.strip() == answer.strip())
