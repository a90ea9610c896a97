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
from numbers import Real

import msgspec

from areal_lite.rewards.function import RewardFunction, load_reward_function
from areal_lite.rewards.messages import Ready, Reply, Request, frame, take_frames
from areal_lite.system.processes import die_with_parent


def execute(function: RewardFunction, request: Request, runner: asyncio.Runner) -> Reply:
    """Call the function, which may be async; every exception becomes a reply."""
    started = time.perf_counter()
    try:
        reward = function(request.completion, request.answer)
        if inspect.iscoroutine(reward):
            reward = runner.run(reward)
    except (Exception, SystemExit) as error:
        seconds = time.perf_counter() - started
        # The text may quote half a character, which cannot be encoded.
        detail = f"{type(error).__name__}: {error}"[:500].encode(errors="replace").decode()
        return Reply(seconds=seconds, reason="exception", detail=detail)
    seconds = time.perf_counter() - started
    if not isinstance(reward, Real) or not math.isfinite(reward):
        detail = f"{reward!r:.100} is not a finite number"
        return Reply(seconds=seconds, reason="bad_result", detail=detail)
    return Reply(seconds=seconds, reward=float(reward))


def main() -> None:
    """Answer requests until standard input ends."""
    die_with_parent()
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
                _write(replies, execute(function, decoder.decode(body), runner))


def _write(fd: int, message: msgspec.Struct) -> None:
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    main()
