"""The trainer's half of `sync.transport=delta`: buckets of changes in place of whole weights.

Servers get changes if all of them hold what the trainer has a copy of (docs/servers.md).
"""

import secrets
from collections.abc import Iterable, Iterator

import torch
from torch.nn.functional import pad

from areal_lite.config import TrainConfig
from areal_lite.delta.server import DELTA, encode, link
from areal_lite.weights.broadcast import Broadcast, FlatBucket, flatten
from areal_lite.weights.recipients import Bucket, PushRecipients


def make_transport(config: TrainConfig, backend: str) -> Broadcast:
    """Make the transport. Entry point of the group `areal_lite.transports`."""
    return Broadcast(config, backend, Deltas().pack)


class Deltas:
    """The weights that the servers have, and what a push has to bring."""

    def __init__(self) -> None:
        self._copy: list[torch.Tensor] = []  # a bucket each: uint8, padded to 8 bytes
        self._state = ""  # its name (server.py:link)
        self._pushes: list[PushRecipients] = []  # those that brought it

    def pack(
        self, buckets: Iterable[Bucket], recipients: PushRecipients, apart: bool
    ) -> Iterable[FlatBucket]:
        """Return what to broadcast for `buckets`, in their order.

        apart: these servers missed a push, and the others keep what they have.
        """
        if apart:
            return self._repeat(buckets, recipients)
        # The servers that failed in a push have left it.
        holders = {server.name: server for push in self._pushes for server in push.servers}
        known = all(holders.get(server.name) == server for server in recipients.servers)
        self._pushes = [recipients]
        if self._copy and known:
            return [self._change(*each, recipients) for each in enumerate(map(flatten, buckets))]
        return self._start(buckets)

    def _start(self, buckets: Iterable[Bucket]) -> Iterator[FlatBucket]:
        """Pack whole weights, and remember them."""
        self._copy = []
        for bucket in map(flatten, buckets):
            self._copy.append(_padded(bucket.data).to("cpu", copy=True))
            self._state = secrets.token_hex(16)
            yield _whole(bucket, "", self._state)

    def _change(self, number: int, bucket: FlatBucket, recipients: PushRecipients) -> FlatBucket:
        """Pack the changes of a bucket, or all of it if they are many, and remember it."""
        new = _padded(bucket.data)
        changes = encode(self._copy[number].to(new.device), new)
        self._copy[number].copy_(new)
        before = self._state
        if changes is None:
            self._state = secrets.token_hex(16)
            return _whole(bucket, before, self._state)
        self._state = link(before, changes)
        recipients.report.megabytes -= (bucket.data.nbytes - len(changes)) / 2**20
        data = torch.frombuffer(bytearray(changes), dtype=torch.uint8).to(new.device)
        load_format = f"{DELTA}:{before}:{self._state}:{len(changes)}"
        return FlatBucket(bucket.description, data, load_format)

    def _repeat(
        self, buckets: Iterable[Bucket], recipients: PushRecipients
    ) -> Iterator[FlatBucket]:
        """Pack whole weights. Their servers hold the copy if the trainer has not trained since."""
        same = bool(self._copy)
        for number, bucket in enumerate(map(flatten, buckets)):
            same = same and torch.equal(self._copy[number], _padded(bucket.data).cpu())
            yield _whole(bucket, "", self._state if same else secrets.token_hex(16))
        if same:
            self._pushes.append(recipients)


def _padded(data: torch.Tensor) -> torch.Tensor:
    return pad(data, (0, -len(data) % 8)) if len(data) % 8 else data


def _whole(bucket: FlatBucket, before: str, after: str) -> FlatBucket:
    return FlatBucket(bucket.description, bucket.data, f"{DELTA}:{before}:{after}:0")
