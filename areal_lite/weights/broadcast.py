"""The `distributed` transport: buckets of weights are broadcast over a process group.

The group has trainer rank 0 as rank 0 and every rank of every server after it. A server joins and
receives when an HTTP request tells it to. The request and the collective wait for each other, so
the collective runs on a thread of its own while the HTTP answers are watched. Otherwise a server
that refuses would leave rank 0 in the broadcast without end.

When one server fails in a collective, all others fail with it. Only the cause is to blame: the
servers that gave no answer at all, if there are any. The others stay, in a new group without the
culprits.
"""

from __future__ import annotations

import logging
import secrets
import socket
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

# torch documents these names but does not mark them as exported.
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed import distributed_c10d as c10d

from areal_lite.servers.blocking import is_reachable, post_each, server_errors, start_post
from areal_lite.servers.client import ServerError, ServerFailed, ServersFailed, ServerUnreachable
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.network import LOOPBACK
from areal_lite.system.threads import start_daemon

log = logging.getLogger(__name__)
# How long to wait, after the first failure, for the failures that tell its cause.
_GRACE_S = 3.0
# An HTTP call waits longer than the collective: a call that is given up first would look as if
# its server did not answer.
_EXTRA_CALL_S = 2 * _GRACE_S


@dataclass(frozen=True)
class FlatBucket:
    """Tensors in one: `data` is uint8 [bytes], `description` as SGLang wants it."""

    description: dict[str, list]
    data: torch.Tensor


def flatten(bucket: list[tuple[str, torch.Tensor]]) -> FlatBucket:
    tensors = [tensor for _, tensor in bucket]
    description = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }
    data = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return FlatBucket(description, torch.cat(data))


class BroadcastGroup:
    """The pusher's WeightGroup, made anew when its servers change. Calls raise ServersFailed."""

    def __init__(self, backend: str, timeout_s: float):
        self._backend = backend
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None

    def join(self, servers: list[ServerInfo]) -> WeightGroup:
        """Return the group with exactly `servers`."""
        if self._group is None or self._group.servers != servers:
            self.leave(servers)
            # Random: the servers may still know groups of an earlier trainer.
            name = f"areal_lite_{secrets.token_hex(8)}"
            self._group = WeightGroup(servers, self._backend, self._timeout_s, name)
        return self._group

    def send(self, bucket: FlatBucket, servers: list[ServerInfo], **options: Any) -> None:
        """Broadcast one bucket to exactly `servers`. For `options` see WeightGroup.send."""
        self.join(servers).send(bucket, **options)

    def leave(self, survivors: list[ServerInfo]) -> None:
        """Leave the group, if there is one, together with `survivors`."""
        group, self._group = self._group, None
        if group is not None:
            group.abandon(survivors)


class WeightGroup:
    """A process group of trainer rank 0 (rank 0) and the ranks of `servers` (1, 2, …).

    The first failure breaks the group: make a new one without the culprits. All calls raise
    ServersFailed.
    """

    def __init__(self, servers: list[ServerInfo], backend: str, timeout_s: float, name: str):
        self.servers = servers
        self._timeout_s = timeout_s
        self._call_timeout_s = timeout_s + _EXTRA_CALL_S
        self._name = name
        world = 1 + sum(server.tensor_parallel for server in servers)
        limit = timedelta(seconds=timeout_s)

        # Step 1: open the store through which the members find each other. It listens on a socket
        # that is bound here: left alone it would listen on every interface.
        address = _own_address(servers)
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
        calls = self._start_joining(address, port, world, backend)

        # Step 3: join, over another connection to the store, as the servers do: closing the store
        # then ends the wait of all members that still join.
        store = TCPStore(address, port, is_master=False, timeout=limit)
        joined = start_daemon(_join, store, backend, world, name, limit)
        try:
            what = f"joining weight group {name}"
            self._group = _wait_together(joined, calls, servers, timeout_s, what)
        except ServersFailed:
            self._store = None
            wait(calls, _GRACE_S)
            raise

    def _start_joining(self, address: str, port: int, world: int, backend: str) -> list[Future]:
        calls = []
        rank = 1
        for server in self.servers:
            body = {
                "master_address": address,
                "master_port": port,
                "rank_offset": rank,
                "world_size": world,
                "group_name": self._name,
                "backend": backend,
            }
            path = "/init_weights_update_group"
            calls.append(start_post(server, path, body, self._call_timeout_s))
            rank += server.tensor_parallel
        return calls

    def send(self, bucket: FlatBucket, *, version: str | None, flush_cache: bool) -> None:
        """Broadcast one bucket. `version` marks the last bucket of a push."""
        body = {
            **bucket.description,
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        path = "/update_weights_from_distributed"
        calls = [start_post(server, path, body, self._call_timeout_s) for server in self.servers]
        sent = start_daemon(_broadcast, bucket.data, self._group)
        what = f"broadcast of {len(bucket.description['names'])} tensors"
        _wait_together(sent, calls, self.servers, self._timeout_s, what)

    def abandon(self, survivors: list[ServerInfo]) -> None:
        """Leave the group together with its members among `survivors`.

        Raises ServersFailed for members that do not answer: they hang in the group.
        """
        remaining = [server for server in self.servers if server in survivors]
        body = {"group_name": self._name}
        errors = post_each(remaining, "/destroy_weights_update_group", body, _EXTRA_CALL_S)
        for error in errors:
            log.warning("could not leave weight group %s: %s", self._name, error)
        if unresponsive := _unreachable(errors):
            raise ServersFailed(unresponsive)
        if remaining == self.servers and not errors:
            dist.destroy_process_group(self._group)


def _join(store: Store, backend: str, world: int, name: str, limit: timedelta) -> dist.ProcessGroup:
    # torch has no public call for a second group with a store and members of its own. SGLang uses
    # the same helper on its side.
    group, _ = c10d._new_process_group_helper(
        world,
        0,
        [],
        c10d.Backend(backend),
        PrefixStore(name, store),
        group_name=name,  # pyright: ignore[reportArgumentType]
        timeout=limit,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def _broadcast(data: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.broadcast(data, src=0, group=group)
    if data.is_cuda:
        torch.cuda.current_stream().synchronize()


def _wait_together(
    collective: Future, calls: list[Future], servers: list[ServerInfo], timeout_s: float, what: str
) -> Any:
    """Return the result of the collective when all HTTP calls have succeeded too.

    The first failure ends the wait. Raises ServersFailed with the servers that caused it.
    """
    # Step 1: wait for everything, or for the first failure.
    done, pending = wait({collective, *calls}, timeout_s, FIRST_EXCEPTION)
    if not pending and all(future.exception() is None for future in done):
        return collective.result()

    # Step 2: collect the failures that follow, and ask the servers that have not answered yet.
    wait(calls, _GRACE_S)
    errors = server_errors(call for call in calls if call.done())
    late = [server for server, call in zip(servers, calls, strict=True) if not call.done()]
    unresponsive = [
        ServerUnreachable(server, f"{what}: does not answer")
        for server in late
        if not is_reachable(server, _GRACE_S)
    ]

    # Step 3: blame the servers that gave no answer, else those that gave an error, else the late.
    culprits = (
        [*_unreachable(errors), *unresponsive]
        or errors
        or [ServerFailed(server, f"{what} took longer than {timeout_s:.0f} s") for server in late]
    )
    if not culprits:
        collective.result(0)  # the collective failed by itself
    raise ServersFailed(culprits)


def _unreachable(errors: list[ServerError]) -> list[ServerError]:
    return [error for error in errors if isinstance(error, ServerUnreachable)]


def _own_address(servers: list[ServerInfo]) -> str:
    """Return the address of this machine that the servers can reach."""
    hosts = [urlsplit(server.url).hostname for server in servers]
    remote = [host for host in hosts if host not in LOOPBACK]
    if not remote:
        return "127.0.0.1"
    # Connecting a UDP socket picks the interface that routes there, and sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((remote[0], 9))
        return probe.getsockname()[0]
