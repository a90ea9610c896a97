"""Rewards for tests with a random model."""

import random

_RANDOM = random.Random(0)


def share_of_letters(completion: str, answer: str) -> float:
    """Return the share of lower-case letters."""
    return sum(c.islower() for c in completion) / max(1, len(completion))


def coin(completion: str, answer: str) -> float:
    """Return 1 or 0 at random, so that some groups have reward variance and others have none."""
    return float(_RANDOM.random() < 0.4)


def always(completion: str, answer: str) -> float:
    """Return 1."""
    return 1.0


def sometimes_fails(completion: str, answer: str) -> float:
    """Return 1, or raise for every fourth completion."""
    if _RANDOM.random() < 0.25:
        raise ValueError("no verdict")
    return 1.0


def half(prompt, answers: list[str]) -> float:
    """End an episode of several turns after the first one, with the reward 0.5."""
    return 0.5
