"""A reward that even a random model gets a signal from."""

import random

_RANDOM = random.Random(0)


def share_of_letters(completion: str, answer: str) -> float:
    """The share of lower-case letters."""
    return sum(c.islower() for c in completion) / max(1, len(completion))


def coin(completion: str, answer: str) -> float:
    """1 or 0 whatever the completion is, so that groups of any completions have some variance, or none."""
    return float(_RANDOM.random() < 0.4)


def always(completion: str, answer: str) -> float:
    return 1.0
