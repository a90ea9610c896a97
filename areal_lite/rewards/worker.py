"""A process that computes rewards: `python -m areal_lite.rewards.worker module:callable`, started by `RewardPool`.

Protocol, both ways: frames of a 4-byte little-endian length and that many bytes of msgpack. The first frame out is a `Ready`; then one
`Reply` for each `Request`, in their order, written as soon as it is known. Standard input and output are kept for the protocol:
what the function prints goes to standard error, what it reads from standard input is empty.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import struct
import sys
import time
from collections.abc import Iterator
from numbers import Real

import msgspec

from areal_lite.rewards.function import RewardFunction, load_reward_function
from areal_lite.system.processes import die_with_parent

_LENGTH = struct.Struct("<I")


class Ready(msgspec.Struct, array_like=True):
    error: str | None = None  # why the function cannot be used


class Request(msgspec.Struct, array_like=True):
    completion: str
    answer: str


class Reply(msgspec.Struct, array_like=True):
    """`reward` is None after a failure; then `reason` is one of `RewardError`'s and `detail` says more. `seconds`: of execution."""

    seconds: float
    reward: float | None = None
    reason: str | None = None
    detail: str = ""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Take the complete frames' bodies off the front of `buffer`."""
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        end = start + _LENGTH.size + _LENGTH.unpack_from(buffer, start)[0]
        if len(buffer) < end:
            break
        yield bytes(buffer[start + _LENGTH.size : end])
        start = end
    del buffer[:start]


def execute(function: RewardFunction, request: Request, loop: asyncio.Runner) -> Reply:
    """Call the function, and await what it returns on `loop` if it is async; whatever it does short of killing the process is a reply."""
    started = time.perf_counter()
    try:
        reward = function(request.completion, request.answer)
        if inspect.iscoroutine(reward):
            reward = loop.run(reward)
    except (Exception, SystemExit) as error:
        detail = (
            f"{type(error).__name__}: {error}"[:500].encode(errors="replace").decode()
        )  # it may quote half a character
        return Reply(time.perf_counter() - started, None, "exception", detail)
    seconds = time.perf_counter() - started
    if not isinstance(reward, Real) or not math.isfinite(reward):
        return Reply(seconds, None, "bad_result", f"{reward!r:.100} is not a finite number")
    return Reply(seconds, float(reward))


def main() -> None:
    die_with_parent()
    requests, replies = os.dup(0), os.dup(1)  # a child of the function does not inherit these
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    try:
        function = load_reward_function(sys.argv[1])
    except ValueError as error:
        _write(replies, Ready(str(error)))
        return
    _write(replies, Ready())
    decoder, buffer = msgspec.msgpack.Decoder(Request), bytearray()
    with (
        asyncio.Runner() as loop
    ):  # one for all samples, so that an async function may keep its connections
        while received := os.read(requests, 1 << 20):
            buffer += received
            for body in take_frames(buffer):
                _write(replies, execute(function, decoder.decode(body), loop))


def _write(fd: int, message: msgspec.Struct) -> None:
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    main()
