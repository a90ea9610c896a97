"""A process that computes rewards: `python -m areal_lite.rewards.worker module:function`.

Standard input and output carry the messages of messages.py. The function's own output goes to
standard error, and its standard input is empty.
"""

import asyncio
import inspect
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable
from numbers import Real

import msgspec

from areal_lite.extensions import load_object
from areal_lite.rewards.keeper import fork_worker
from areal_lite.rewards.messages import Ready, Reply, Request, frame, take_frames

RewardFunction = Callable[[str, str], float | Awaitable[float]]


def load_reward_function(name: str) -> RewardFunction:
    """Import the reward function `module:name`.

    Raises ValueError if it cannot be imported or cannot be called as f(completion, answer).
    """
    if not name:
        raise ValueError(
            "reward.function is not set: name what scores a completion: module:function, "
            "f(completion, answer) -> float, such as areal_lite.rewards.exact:exact_reward"
        )
    function = load_object("reward.function", name)
    try:
        inspect.signature(function).bind("completion", "answer")
    except TypeError as error:
        raise ValueError(
            f"reward.function={name} is called as f(completion, answer): {error}"
        ) from None
    return function


def execute(function: RewardFunction, request: Request, runner: asyncio.Runner) -> Reply:
    """Call the function, which may be async; whatever it raises becomes a reply."""
    started = time.perf_counter()
    reply = Reply(number=request.number, seconds=0.0)
    try:
        reward = function(request.completion, request.answer)
        if inspect.iscoroutine(reward):
            reward = runner.run(reward)
    except BaseException as error:  # KeyboardInterrupt and CancelledError too
        reply.reason = "exception"
        reply.detail = _text("{}: {}", type(error).__name__, error)
    else:
        reply.reward = _finite(reward)
        if reply.reward is None:
            reply.reason = "bad_result"
            reply.detail = _text("{!r:.100} is not a finite number", reward)
    reply.seconds = time.perf_counter() - started
    return reply


def _finite(reward: object) -> float | None:
    """Return a finite real number as a float, or None."""
    try:
        value = float(reward) if isinstance(reward, Real) else math.nan
    except Exception:  # too large for a float
        return None
    return value if math.isfinite(value) else None


def _text(template: str, *values: object) -> str:
    """Format a short text that can be encoded: an object may describe itself in any way."""
    try:
        return template.format(*values)[:500].encode(errors="replace").decode()
    except Exception as error:
        return f"its description raises {type(error).__name__}"


def main() -> None:
    """Answer requests until standard input ends."""
    fork_worker()
    pid = os.getpid()
    # The duplicates are not inherited by processes that the function starts.
    requests = os.dup(0)
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        function = load_reward_function(sys.argv[1])
    except ValueError as error:
        _write(replies, Ready(str(error)))
        return
    _write(replies, Ready())
    decoder = msgspec.msgpack.Decoder(Request)
    buffer = bytearray()
    # One event loop for all samples, so that an async function may keep its connections.
    with asyncio.Runner() as runner:
        while received := os.read(requests, 1 << 20):
            buffer += received
            for body in take_frames(buffer):
                reply = execute(function, decoder.decode(body), runner)
                if os.getpid() != pid:
                    os._exit(0)  # the function forked, and this is the child
                _write(replies, reply)


def _write(fd: int, message: msgspec.Struct) -> None:
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    main()
