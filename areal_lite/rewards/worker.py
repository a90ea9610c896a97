"""A process that computes rewards: `python -m areal_lite.rewards.worker` (workers/process.py)."""

import asyncio
import importlib
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, SupportsFloat

import msgspec

from areal_lite.extensions import load_object
from areal_lite.workers import process

_LARGEST = 3.4e38  # the trainer has rewards in float32
ENV_TIMEOUT_S = "AREAL_LITE_REWARD_TIMEOUT_S"  # tells a reward function its own limit


class Sample(msgspec.Struct, array_like=True):
    """A completion to score against its answer, and the other columns of its row."""

    completion: str
    answer: str
    info: dict[str, Any] = {}


def is_rubric(name: str) -> bool:
    """Return whether `reward.function` names the rubric of a judge, not a function."""
    return name.endswith(".md")


RewardFunction = Callable[..., float | Awaitable[float]]


def load_reward_function(name: str) -> RewardFunction:
    """Import the reward function `module:name`.

    Raises ValueError if it cannot be imported or cannot be called as f(completion, answer). It gets
    the other columns of the row too if it has a parameter `info`.
    """
    if not name:
        raise ValueError(
            "reward.function is not set: name what scores a completion: module:function, "
            "f(completion, answer) -> float, such as areal_lite.rewards.exact:exact_reward"
        )
    function = load_object("reward.function", name)
    if is_rubric(name):
        return function  # what makes a JudgePool
    try:
        inspect.signature(function).bind("completion", "answer", **_more(function, {}))
    except TypeError as error:
        raise ValueError(
            f"reward.function={name} is called as f(completion, answer), or with info=: {error}"
        ) from None
    return function


def _more(function: RewardFunction, info: dict[str, Any]) -> dict[str, Any]:
    return {"info": info} if "info" in inspect.signature(function).parameters else {}


def answer_check(name: str) -> Callable[[str], object] | None:
    """Return what checks an answer for a verifier of this package: `check_answer` of its module.

    It raises ValueError for an answer that no completion can match. None for any other function.
    """
    module, _, _ = name.partition(":")
    if not module.startswith("areal_lite.rewards."):
        return None
    return getattr(importlib.import_module(module), "check_answer", None)


def execute(
    function: RewardFunction, sample: Sample, runner: asyncio.Runner
) -> float | tuple[str, str]:
    """Call the function, which may be async. Return the reward, or why there is none."""
    try:
        reward = function(sample.completion, sample.answer, **_more(function, sample.info))
        if inspect.iscoroutine(reward):
            reward = runner.run(reward)
    except BaseException as error:  # KeyboardInterrupt and CancelledError too
        return "exception", process.short_text("{}: {}", type(error).__name__, error)
    with suppress(Exception):  # too large for a float
        if isinstance(reward, SupportsFloat) and abs(value := float(reward)) <= _LARGEST:
            return value
    return "bad_result", process.short_text("{!r:.100} is not a finite float32", reward)


def _load(name: str, timeout_s: float) -> RewardFunction:
    os.environ[ENV_TIMEOUT_S] = str(timeout_s)
    return load_reward_function(name)


def main() -> None:
    pipes, function = process.start_worker(lambda *setup: partial(_load, *setup))
    pid = os.getpid()
    pipes.send(process.Ready())
    # One event loop for all samples, so that an async function may keep its connections.
    with asyncio.Runner() as runner:
        while (messages := pipes.receive()) is not None:
            for message in messages:
                if not isinstance(message, process.Request):
                    continue  # a sample that nobody waits for is scored all the same
                started = time.perf_counter()
                result = execute(function, process.unpack(message.body, Sample), runner)
                if os.getpid() != pid:
                    os._exit(0)  # the function forked, and this is the child
                facts = {"number": message.number, "seconds": time.perf_counter() - started}
                if isinstance(result, tuple):
                    pipes.send(process.Failed(**facts, reason=result[0], detail=result[1]))
                else:
                    pipes.send(process.Done(**facts, body=process.pack(result)))


if __name__ == "__main__":
    main()
