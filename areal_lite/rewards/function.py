"""Reward functions by their import path."""

import inspect
from collections.abc import Awaitable, Callable

from areal_lite.system.imports import load_object

RewardFunction = Callable[[str, str], float | Awaitable[float]]


def load_reward_function(name: str) -> RewardFunction:
    """Import the reward function `module:name`.

    Raises ValueError if it cannot be imported or cannot be called as f(completion, answer).
    """
    function = load_object("reward.function", name)
    try:
        inspect.signature(function).bind("completion", "answer")
    except TypeError as error:
        raise ValueError(
            f"reward.function={name} is called as f(completion, answer): {error}"
        ) from None
    return function
