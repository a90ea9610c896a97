"""The reward of this example."""

import re


def last_number(completion: str, answer: str) -> float:
    """Return 1.0 if the last number of `completion` is `answer`, else 0.0."""
    numbers = re.findall(r"\d+", completion)
    return float(numbers[-1:] == [answer])
