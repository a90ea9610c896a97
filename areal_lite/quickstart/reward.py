"""Verifier of addition: only the final answer counts, not the work that leads to it."""


def addition_reward(completion: str, answer: str) -> float:
    """Return 1.0 if the text after the last `#` of `completion` is `answer`, else 0.0.

    White space around it does not count. Never raises, whatever the model wrote.
    """
    _, mark, stated = completion.rpartition("#")
    return float(bool(mark) and stated.strip() == answer.strip())
