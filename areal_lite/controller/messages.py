"""Trainer ranks <-> controller over ZeroMQ: msgpack messages, arrays as raw frames, no pickle.

A request is one frame (`Envelope`), a reply one frame (`Reply`) and, for a batch, the frames of TrainBatch. Address and a random token
are in `<run_dir>/controller.json`, readable by its owner alone; a message without the token is refused. Loopback is bound, or, for a run on
several machines, the address of this one.

    batch(step, rank, world)   this rank's shard of the batch that the step from version `step` to `step + 1` trains on
    begin_push(version)        new weights are about to be pushed to the servers named; in mode `none`, once nothing is in flight
    pushed(version, failed)    the servers have them, but for those named
    evaluate(version)          accuracy on held-out problems
    finish()                   the end of training: totals; the controller exits
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

ADDRESS_FILE = "controller.json"


class Batch(msgspec.Struct, tag="batch", frozen=True):
    """`catch_ups`: how often this rank has been told to push again what it pushed last. An answer without frames says: once more."""

    step: int
    rank: int
    world: int
    catch_ups: int = 0

    def __str__(self) -> str:
        return f"the batch of step {self.step} (rank {self.rank} of {self.world})"


class BeginPush(msgspec.Struct, tag="begin_push", frozen=True):
    version: int

    def __str__(self) -> str:
        return f"leave to push version {self.version}"


class Pushed(msgspec.Struct, tag="pushed", frozen=True):
    version: int
    failed: list[str]

    def __str__(self) -> str:
        return f"the controller to note that version {self.version} was pushed"


class Evaluate(msgspec.Struct, tag="evaluate", frozen=True):
    version: int

    def __str__(self) -> str:
        return f"the evaluation at version {self.version}"


class Finish(msgspec.Struct, tag="finish", frozen=True):
    def __str__(self) -> str:
        return "the totals of the run"


Request = Batch | BeginPush | Pushed | Evaluate | Finish


class Envelope(msgspec.Struct):
    token: str
    id: int
    request: Request


class Reply(msgspec.Struct):
    id: int
    error: str | None = None
    body: dict[str, Any] = {}


class Address(msgspec.Struct):
    url: str
    token: str
    pid: int
    place: str  # where `pid` is a process: process_namespace()


Answer = tuple[dict[str, Any], Sequence[Any]]  # body, frames of a batch


Handler = Callable[[Request], Awaitable[Answer]]


def process_namespace() -> str:
    """The machine, and the container on it, whose process numbers we know."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
