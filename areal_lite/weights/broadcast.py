"""The `distributed` transport: buckets of weights are broadcast over a process group.

Rank 0 is trainer rank 0, and every rank of every server comes after it. A server joins and receives
when an HTTP request tells it to. The collective runs on a thread of its own while the HTTP answers
are watched. Otherwise a server that refuses would leave rank 0 in the broadcast without end.

When one server fails in a collective, all others fail with it. Only the cause is to blame, and the
others join a new group without the culprits (docs/servers.md, Weight groups).
"""

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch

# torch documents this name but does not mark it as exported.
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from areal_lite.config import LoraConfig, TrainConfig
from areal_lite.servers.blocking import server_errors, start_post, start_reaching
from areal_lite.servers.client import ServerError, ServerFailed, ServersFailed, ServerUnreachable
from areal_lite.servers.registry import ServerInfo
from areal_lite.sglang_plugins.weight_group import (
    ADAPTERS,
    AHEAD,
    GIVEN_UP,
    GROUP_PREFIX,
    CollectiveError,
    GroupMember,
    is_collective_error,
)
from areal_lite.system.network import address_towards
from areal_lite.system.processes import start_daemon
from areal_lite.weights.recipients import Bucket, PushRecipients

log = logging.getLogger(__name__)
_JOIN = "/init_weights_update_group"
# How long to wait, after the first failure, for the failures that tell its cause.
_GRACE_S = 3.0
# An HTTP call waits longer than the collective: a call that is given up first would look as if
# its server did not answer.
_EXTRA_CALL_S = 2 * _GRACE_S


@dataclass(frozen=True)
class FlatBucket:
    """Tensors in one, for SGLang's `load_format`.

    `data` is uint8 [bytes], `description` as SGLang wants it.
    """

    description: dict[str, list]
    data: torch.Tensor
    load_format: str = "flattened_bucket"
    ahead: bool = False  # servers load it beside their weights, while they generate


def flatten(bucket: Bucket) -> FlatBucket:
    tensors = [tensor for _, tensor in bucket]
    description = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }
    data = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return FlatBucket(description, torch.cat(data))


def pack_adapters(
    lora: LoraConfig, ahead: bool, buckets: Iterable[Bucket], *_: object
) -> Iterator[FlatBucket]:
    """Pack adapters. ahead: the servers have the memory to add them before the pause."""
    load_format = f"{ADAPTERS}:{lora.alpha / lora.rank}"
    for bucket in map(flatten, buckets):
        yield replace(bucket, load_format=load_format, ahead=ahead)
    if ahead:
        yield FlatBucket({"names": [], "dtypes": [], "shapes": []}, torch.empty(0), AHEAD)


Pack = Callable[[Iterable[Bucket], PushRecipients, bool], Iterable[FlatBucket]]
"""Makes what is broadcast to recipients; the flag is `apart` of a transfer."""


class Broadcast:
    """The transport over a process group, by torch's `backend`.

    Its WeightGroup is made anew when its servers change. Its calls raise as that does.
    """

    def __init__(self, config: TrainConfig, backend: str, pack: Pack | None = None):
        self._config = config
        self._backend = backend
        self._pack = pack or (lambda buckets, *_: map(flatten, buckets))
        self._group: WeightGroup | None = None

    def transfer(
        self, recipients: PushRecipients, buckets: Iterable[Bucket], *, apart: bool
    ) -> None:
        way = Broadcast(self._config, self._backend, self._pack) if apart else self
        recipients.run_together(way.join)
        way._broadcast(recipients, self._pack(buckets, recipients, apart))
        if apart:
            recipients.run_together(way.leave)

    def _broadcast(self, recipients: PushRecipients, packed: Iterable[FlatBucket]) -> None:
        rest = self._send_ahead(packed, recipients)
        stream: Iterator[tuple[Any, Any]] = pairwise(chain(rest, [None]))
        first = next(stream)  # gathered and flattened before the pause
        with recipients.paused():
            recipients.post("/begin_weight_update", {})
            with ThreadPoolExecutor(1) as wire:
                sending: Future[None] | None = None
                # Each round gathers a bucket while another is on the wire.
                for bucket, following in chain([first], stream):
                    send = partial(self.send, bucket)
                    if following is None:
                        version = str(recipients.report.version)
                        send = partial(send, version=version, flush_cache=recipients.flush_cache)
                    if sending:
                        sending.result()
                    sending = wire.submit(recipients.run_together, send)
                assert sending is not None
                sending.result()
            recipients.post("/end_weight_update", {})

    def _send_ahead(self, packed: Iterable[FlatBucket], to: PushRecipients) -> Iterator[FlatBucket]:
        """Send the buckets that come before the pause, and yield the others."""
        for bucket in packed:
            if bucket.ahead:
                to.run_together(partial(self.send, bucket))
            else:
                yield bucket

    def close(self, servers: list[ServerInfo]) -> None:
        # A group that torch destroys at the end would wait for its servers.
        with suppress(ServersFailed):
            self.leave(servers)

    def join(self, servers: list[ServerInfo]) -> "WeightGroup":
        """Return the group with exactly `servers`."""
        if self._group is None or self._group.servers != servers:
            self.leave(servers)
            # Random: the servers may still know groups of an earlier trainer.
            name = f"{GROUP_PREFIX}{secrets.token_hex(8)}"
            self._group = WeightGroup(servers, self._backend, self._config.sync.timeout_s, name)
        return self._group

    def send(
        self,
        bucket: FlatBucket,
        servers: list[ServerInfo],
        *,
        version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Broadcast one bucket to exactly `servers`. `version` marks the last one of a push."""
        options = {"load_format": bucket.load_format, "flush_cache": flush_cache}
        try:
            self.join(servers).send(bucket, options | {"weight_version": version})
        except CollectiveError:
            self.leave(servers)  # it is broken: the next call makes another one
            raise

    def leave(self, survivors: list[ServerInfo]) -> None:
        """Leave the group, if there is one, together with `survivors`."""
        group, self._group = self._group, None
        if group is not None:
            group.abandon(survivors)


class WeightGroup:
    """A process group of trainer rank 0 (rank 0) and the ranks of `servers` (1, 2, …).

    The first failure breaks the group. All calls raise ServersFailed, or CollectiveError if no
    server is to blame.
    """

    def __init__(self, servers: list[ServerInfo], backend: str, timeout_s: float, name: str):
        self.servers = servers
        self._timeout_s = timeout_s
        self._call_timeout_s = timeout_s + _EXTRA_CALL_S
        self._name = name
        self._loads = 0  # of all ranks, beside their weights
        world = 1 + sum(server.tensor_parallel for server in servers)
        limit = timedelta(seconds=timeout_s)

        # Step 1: open the store through which the members find each other. It listens on a socket
        # that is bound here: left alone it would listen on every interface.
        address = address_towards(server.url for server in servers)
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=limit,
        )

        # Step 2: tell the servers to join.
        calls, rank = [], 1
        body = {"master_address": address, "master_port": port, "world_size": world}
        body |= {"group_name": name, "backend": backend}
        self._ahead = {**body, "rank_offset": 0, "group_name": AHEAD}
        for server in servers:
            own = {**body, "rank_offset": rank}
            calls.append(start_post(server, _JOIN, own, self._call_timeout_s))
            rank += server.tensor_parallel

        # Step 3: join, over another connection to the store, as the servers do: closing the store
        # then ends the wait of all members that still join.
        store = TCPStore(address, port, is_master=False, timeout=limit)
        self._given_up = threading.Event()
        self._member: Future[GroupMember] = start_daemon(
            lambda: GroupMember(store, backend, world=world, rank=0, name=name, limit=limit)
        )
        self.wait_together(self._member, calls, f"joining weight group {name}")

    def send(self, bucket: FlatBucket, options: dict[str, Any]) -> None:
        """Broadcast one bucket; `options` are further fields of SGLang's request."""
        body = {**bucket.description, "group_name": self._name, **options}
        path = "/update_weights_from_distributed"
        if bucket.ahead:  # SGLang answers no other request for groups while it generates
            path, body = _JOIN, self._ahead | {"backend": json.dumps(body)}
            self._loads += self._ahead["world_size"] - 1
        calls = [start_post(server, path, body, self._call_timeout_s) for server in self.servers]
        sent = start_daemon(self._broadcast, bucket.data)
        self.wait_together(sent, calls, f"broadcast of {len(bucket.description['names'])} tensors")

    def _broadcast(self, data: torch.Tensor) -> None:
        """Broadcast `data`, if any, and wait until the servers have loaded what came ahead."""
        member = self._member.result()
        if len(data):
            member.broadcast(data, self._given_up.is_set)
        while self._loads and member.store.add(AHEAD, 0) < self._loads:
            asked = [start_reaching(server, _GRACE_S) for server in self.servers]
            if self._given_up.is_set() or not all(call.result() for call in asked):
                raise CollectiveError(GIVEN_UP)
            time.sleep(0.1)  # each question takes time from the loads

    def wait_together(self, collective: Future, calls: list[Future], what: str) -> None:
        """Wait until the collective `what` and all HTTP calls, one to each server, have succeeded.

        The first failure ends the wait, and so does the end of the time. The group is then broken
        up for everyone. Raises ServersFailed with the servers that caused it, or CollectiveError if
        there are none.
        """
        # Step 1: wait for everything, or for the first failure.
        done, pending = wait({collective, *calls}, self._timeout_s, FIRST_EXCEPTION)
        if not pending and all(future.exception() is None for future in done):
            return

        # Step 2: give up, which the other servers then answer. Meanwhile ask those that have not
        # answered yet, all at once: hung servers delay the healthy ones by one grace period in
        # total.
        reason = collective.exception() if collective.done() else None
        before = server_errors(call for call in calls if call.done())
        self.break_up()
        pairs = list(zip(self.servers, calls, strict=True))
        asked = {one.name: start_reaching(one, _GRACE_S) for one, call in pairs if not call.done()}
        wait([collective, *calls], _GRACE_S)
        errors = server_errors(call for call in calls if call.done())
        late = [server for server, call in pairs if not call.done()]

        # Step 3: blame.
        silent = [server for server in late if not asked[server.name].result()]
        if culprits := _culprits(errors, before, late, silent, what):
            if reason is not None:
                log.warning("%s failed on the trainer's side too: %s", what, reason)
            raise ServersFailed(culprits)
        seen = [error for error in errors if GIVEN_UP not in str(error)]
        too_long = f"it took longer than sync.timeout_s={self._timeout_s:g}"
        cause = reason or next(iter(seen), too_long)
        raise CollectiveError(f"{what}, while every server answers: {cause}") from reason

    def break_up(self) -> None:
        """End the group for all members, even those in a collective. The trainer leaves it too."""
        self._given_up.set()
        self._store = None
        # A member that still joins leaves as soon as it has joined.
        self._member.add_done_callback(_leave)

    def abandon(self, survivors: list[ServerInfo]) -> None:
        """Leave the group together with its members among `survivors`.

        Raises ServersFailed for members that do not answer: they hang in the group.
        """
        body = {"group_name": self._name}
        path = "/destroy_weights_update_group"
        remaining = [server for server in self.servers if server in survivors]
        calls = [start_post(server, path, body, _EXTRA_CALL_S) for server in remaining]
        # At the same time as the servers: NCCL's ranks on one machine wait for each other.
        self.break_up()
        errors = server_errors(calls)
        for error in errors:
            log.warning("could not leave weight group %s: %s", self._name, error)
        if unresponsive := _unreachable(errors):
            raise ServersFailed(unresponsive)


def _leave(joined: Future[GroupMember]) -> None:
    if joined.exception() is None:
        joined.result().abort()


def _culprits(
    errors: list[ServerError],
    before: list[ServerError],
    late: list[ServerInfo],
    silent: list[ServerInfo],
    what: str,
) -> list[ServerError]:
    """Return the servers to blame: the silent ones, else the refusing, else the late.

    A server that only saw the collective fail is not to blame. The errors `before` came before it
    was given up. `silent` are the late ones that do not even answer a question about their health.
    """
    unresponsive = [ServerUnreachable(server, f"{what}: does not answer") for server in silent]
    return (
        [*_unreachable(errors), *unresponsive]
        or [one for one in errors if not is_collective_error(one, given_up=one not in before)]
        or [ServerFailed(server, f"{what} does not end") for server in late]
    )


def _unreachable(errors: list[ServerError]) -> list[ServerError]:
    return [error for error in errors if isinstance(error, ServerUnreachable)]
