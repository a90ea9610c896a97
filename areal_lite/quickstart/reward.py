"""Verifier of addition: only the final answer counts, not the work that leads to it.

Contract: a pure function of its two strings that never raises, whatever the model wrote.
"""


def addition_reward(completion: str, answer: str) -> float:
    """1.0 if the text after the last `#` of `completion` is `answer`, but for white space around it; else 0.0."""
    _, mark, stated = completion.rpartition("#")
    return float(bool(mark) and stated.strip() == answer.strip())
