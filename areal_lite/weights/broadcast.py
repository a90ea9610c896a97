"""The `distributed` transport: a process group of trainer rank 0 and every server rank, over which buckets of weights are broadcast.

A server joins and receives when an HTTP request tells it to. That request and the collective wait for each other, so the collective runs on
a thread of its own and the HTTP answers are watched meanwhile: a server that refuses would otherwise leave rank 0 in the broadcast for ever.

When one server fails in a collective the others fail with it. Only who caused it is to blame: those that gave no answer at all, if there are
any. The others stay, in a group without the culprits.
"""

from __future__ import annotations

import logging
import socket
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from areal_lite.servers.control import (
    ServerError,
    ServersFailed,
    answers,
    in_thread,
    post,
    post_each,
)
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.network import LOOPBACK

log = logging.getLogger(__name__)
_GRACE_S = 3.0  # after the first failure, for the failures that tell its cause
_PATIENCE_S = (
    2 * _GRACE_S
)  # an HTTP call waits for longer than the collective: giving up on it would look like its server's silence


@dataclass(frozen=True)
class FlatBucket:
    """Named tensors as one: `data` uint8 [bytes]; names, dtypes and shapes as SGLang wants them."""

    described: dict[str, list]
    data: torch.Tensor


def flatten(bucket: list[tuple[str, torch.Tensor]]) -> FlatBucket:
    described = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }
    return FlatBucket(
        described,
        torch.cat(
            [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]
        ),
    )


class WeightGroup:
    """Trainer rank 0 (rank 0) and the ranks of `servers` (1, 2, …). Broken by the first failure: make a new one without the culprits.

    Joining and sending raise ServersFailed.
    """

    def __init__(self, servers: list[ServerInfo], backend: str, timeout_s: float, name: str):
        self.servers, self.timeout_s, self.name = servers, timeout_s, name
        world = 1 + sum(server.tensor_parallel for server in servers)
        address = _own_address(servers)
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        # The store listens on the socket we bound: left alone it would listen on every interface.
        limit = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=limit,
        )
        calls, offset = [], 1
        for server in servers:
            body = {
                "master_address": address,
                "master_port": port,
                "rank_offset": offset,
                "world_size": world,
                "group_name": name,
                "backend": backend,
            }
            calls.append(
                in_thread(post, server, "/init_weights_update_group", body, timeout_s + _PATIENCE_S)
            )
            offset += server.tensor_parallel
        # Through a connection of its own, as the servers do: closing the store then ends the wait of all who still join.
        joined = in_thread(
            _join,
            dist.TCPStore(address, port, is_master=False, timeout=limit),
            backend,
            world,
            name,
            limit,
        )
        try:
            self._group = _together(
                joined, calls, servers, timeout_s, f"joining weight group {name}"
            )
        except ServersFailed:
            self._store = None
            wait(calls, _GRACE_S)
            raise

    def send(self, bucket: FlatBucket, *, version: str | None, flush_cache: bool) -> None:
        """Broadcast one bucket. `version` marks the last bucket of a push."""
        body = {
            **bucket.described,
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        limit = self.timeout_s + _PATIENCE_S
        calls = [
            in_thread(post, server, "/update_weights_from_distributed", body, limit)
            for server in self.servers
        ]
        sent = in_thread(_broadcast, bucket.data, self._group)
        _together(
            sent,
            calls,
            self.servers,
            self.timeout_s,
            f"broadcast of {len(bucket.described['names'])} tensors",
        )

    def abandon(self, survivors: list[ServerInfo]) -> None:
        """Leave the group, and have those leave it that are still there. Raises ServersFailed: one that hangs in it is of no use any more."""
        remaining = [server for server in self.servers if server in survivors]
        errors = post_each(
            remaining, "/destroy_weights_update_group", {"group_name": self.name}, _PATIENCE_S
        )
        for error in errors:
            log.warning("could not leave weight group %s: %s", self.name, error)
        if silent := [error for error in errors if not error.answered]:
            raise ServersFailed(silent)
        if remaining == self.servers and not errors:
            dist.destroy_process_group(self._group)


def _join(
    store: dist.Store, backend: str, world: int, name: str, limit: timedelta
) -> dist.ProcessGroup:
    # torch has no public call for a second group with a store and members of its own; SGLang's side of it uses the same helper.
    group, _ = c10d._new_process_group_helper(
        world,
        0,
        [],
        c10d.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def _broadcast(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.broadcast(flat, src=0, group=group)
    if flat.is_cuda:
        torch.cuda.current_stream().synchronize()


def _together(
    collective: Future, calls: list[Future], servers: list[ServerInfo], timeout_s: float, what: str
) -> Any:
    """The result of the collective, when all HTTP answers are there too. The first failure ends the wait. Raises ServersFailed."""
    done, pending = wait({collective, *calls}, timeout_s, FIRST_EXCEPTION)
    if not pending and all(future.exception() is None for future in done):
        return collective.result()
    wait(calls, _GRACE_S)
    errors = [call.exception() for call in calls if call.done() and call.exception() is not None]
    for error in errors:
        if not isinstance(error, ServerError):
            raise error
    late = [server for server, call in zip(servers, calls) if not call.done()]
    mute = [server for server in late if not answers(server, _GRACE_S)]
    unanswered = [error for error in errors if not error.answered] + [
        ServerError(s, f"{what}: does not answer") for s in mute
    ]
    culprits = (
        unanswered
        or errors
        or [ServerError(s, f"{what} took longer than {timeout_s:.0f} s") for s in late]
    )
    if not culprits:
        collective.result(0)  # it failed by itself
    raise ServersFailed(culprits)


def _own_address(servers: list[ServerInfo]) -> str:
    """The address under which servers reach this process: loopback when they are all on it."""
    hosts = [urlsplit(server.url).hostname for server in servers]
    if all(host in LOOPBACK for host in hosts):
        return "127.0.0.1"
    target = next(host for host in hosts if host not in LOOPBACK)
    with socket.socket(
        socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:  # picks the interface that routes there; sends nothing
        probe.connect((target, 9))
        return probe.getsockname()[0]
