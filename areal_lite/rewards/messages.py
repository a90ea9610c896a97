"""Messages between a reward pool and its worker processes.

A stream, either way, is a sequence of frames: a 4-byte little-endian length and that many bytes of
msgpack. A worker sends one `Ready`, then one `Reply` per `Request`, in order and with its number.
"""

import struct
from collections.abc import Iterator

import msgspec

_LENGTH = struct.Struct("<I")


class Ready(msgspec.Struct, array_like=True):
    """A worker has started. `error` says why it cannot use the function."""

    error: str | None = None


class Request(msgspec.Struct, array_like=True):
    """A completion to score against its answer. `number` differs for each request of a pool."""

    number: int
    completion: str
    answer: str


class Reply(msgspec.Struct, array_like=True, kw_only=True):
    """The result of request `number` after `seconds` of execution.

    After a failure `reward` is None and `reason` is one of RewardError's.
    """

    number: int
    seconds: float
    reward: float | None = None
    reason: str | None = None
    detail: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as one frame."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Remove the complete frames from the front of `buffer` and yield their bodies."""
    start = 0
    while len(buffer) - start >= _LENGTH.size:
        end = start + _LENGTH.size + _LENGTH.unpack_from(buffer, start)[0]
        if len(buffer) < end:
            break
        yield bytes(buffer[start + _LENGTH.size : end])
        start = end
    del buffer[:start]
