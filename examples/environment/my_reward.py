"""The reward of this example: the environment's own, for a model that knows no `<answer>` tags."""

import re

from areal_lite.environments.reasoning_gym import reward


def last_number(completion: str, answer: str, info: dict) -> float:
    """Return the task's score of the last number of `completion`."""
    numbers = re.findall(r"-?\d+", completion)
    return reward(f"<answer>{''.join(numbers[-1:])}</answer>", answer, info)
