"""A reward that even a random model gets a signal from."""


def share_of_letters(completion: str, answer: str) -> float:
    """The share of lower-case letters."""
    return sum(c.islower() for c in completion) / max(1, len(completion))
