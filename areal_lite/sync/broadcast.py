"""The `distributed` transport: a process group of trainer rank 0 and every server rank, over which buckets of weights are broadcast.

A server joins and receives when an HTTP request tells it to. That request and the collective wait for each other, so the collective runs on
a thread of its own and the HTTP answers are watched meanwhile: a server that refuses would otherwise leave rank 0 in the broadcast for ever.
"""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from areal_lite.rollout.server import LOOPBACK, ServerInfo
from areal_lite.sync.control import ServerError, in_thread, post, post_each

log = logging.getLogger(__name__)


class WeightGroup:
    """Trainer rank 0 (rank 0) and the ranks of `servers` (1, 2, …). Broken by the first failure: make a new one without the culprit."""

    def __init__(self, servers: list[ServerInfo], backend: str, timeout_s: float, name: str):
        self.servers, self.timeout_s, self.name = servers, timeout_s, name
        world = 1 + sum(server.tensor_parallel for server in servers)
        address = _own_address(servers)
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        # The store listens on the socket we bound: left alone it would listen on every interface.
        self._store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=timedelta(seconds=timeout_s)
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
            calls.append(in_thread(post, server, "/init_weights_update_group", body, timeout_s))
            offset += server.tensor_parallel
        joined = in_thread(_join, self._store, backend, world, name, timeout_s)
        _together(joined, calls, servers, timeout_s, f"joining weight group {name}")
        self._group = joined.result()

    def send(self, bucket: list[tuple[str, torch.Tensor]], *, version: str | None, flush_cache: bool) -> None:
        """Broadcast one bucket, flattened to one tensor. `version` marks the last bucket of a push. Raises ServerError."""
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        flat = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
        calls = [in_thread(post, server, "/update_weights_from_distributed", body, self.timeout_s) for server in self.servers]
        sent = in_thread(_broadcast, flat, self._group)
        _together(sent, calls, self.servers, self.timeout_s, f"broadcast of {len(bucket)} tensors")

    def abandon(self, survivors: list[ServerInfo]) -> None:
        """Leave the group; servers that are still there leave it too. A collective that hangs on a dead server is left to its time-out."""
        remaining = [server for server in self.servers if server in survivors]
        errors = post_each(remaining, "/destroy_weights_update_group", {"group_name": self.name}, self.timeout_s)
        for error in errors:
            log.warning("could not leave weight group %s: %s", self.name, error)
        if remaining == self.servers and not errors:
            dist.destroy_process_group(self._group)


def _join(store: dist.Store, backend: str, world: int, name: str, timeout_s: float) -> dist.ProcessGroup:
    # torch has no public call for a second group with a store and members of its own; SGLang's side of it uses the same helper.
    group, _ = c10d._new_process_group_helper(
        world, 0, [], c10d.Backend(backend), dist.PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=timeout_s)
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def _broadcast(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.broadcast(flat, src=0, group=group)
    if flat.is_cuda:
        torch.cuda.current_stream().synchronize()


def _together(collective: Future, calls: list[Future], servers: list[ServerInfo], timeout_s: float, what: str) -> None:
    """Wait for the collective and all HTTP answers; the first server that fails ends the wait, because its answer names it."""
    deadline = time.monotonic() + timeout_s
    pending = {collective, *calls}
    while pending:
        done, pending = wait(pending, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        for call in calls:
            if call.done():
                call.result()
        if not done:
            late = next((server for server, call in zip(servers, calls) if not call.done()), servers[0])
            raise ServerError(late, f"{what} took longer than {timeout_s:.0f} s")
    collective.result()


def _own_address(servers: list[ServerInfo]) -> str:
    """The address under which servers reach this process: loopback when they are all on it."""
    hosts = [urlsplit(server.url).hostname for server in servers]
    if all(host in LOOPBACK for host in hosts):
        return "127.0.0.1"
    target = next(host for host in hosts if host not in LOOPBACK)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # picks the interface that routes there; sends nothing
        probe.connect((target, 9))
        return probe.getsockname()[0]
