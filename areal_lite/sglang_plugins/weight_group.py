"""One rank's end of a weight group: trainer rank 0, or a rank of a server.

A peer that dies can leave a broadcast over NCCL in the GPU without end, and NCCL reports nothing.
Three things keep a process in control of its own end (torch 2.13, ProcessGroupNCCL.cpp):

* The broadcast is asynchronous, on a stream of NCCL's, and this side polls it.
* No watchdog runs for the group. A watchdog would end the process at the first error: even one
  that is told to ignore errors makes the default group's monitor end the process, through the
  static `shouldDump_`. Torch starts none in blocking-wait mode.
* The rank can leave the group alone, with `abort`. Communicators that are destroyed in order would
  wait for each other.

The group lives as long as its store, which is on trainer rank 0. Closing the store tells every
member to give up, and so does the death of the trainer.
"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# torch documents these names but does not mark them as exported.
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed import distributed_c10d as c10d

from areal_lite.system.processes import environment

ADAPTERS = "areal_lite_adapters"
"""Begins the `load_format` of a push of adapters alone: areal_lite_adapters:SCALE."""
AHEAD = "ahead_of_pause"
"""Names requests to load weights before a pause, their number, and the request to take them."""
GROUP_PREFIX = "areal_lite_"  # begins the name of every group of ours
JOIN_FAILED = "cannot join weight group"
_FAILED = "the collective failed"
GIVEN_UP = "given up"
# The store listens before anyone is told to join, so a connection takes no longer than the network.
_CONNECT_S = 5.0
# Gloo cannot end a broadcast. Its group stays here: deleting it would wait for the broadcast.
_unfinished: list[tuple[Any, Any]] = []


class CollectiveError(RuntimeError):
    """A collective that failed or was given up, as the backend describes it."""

    def __init__(self, reason: object):
        super().__init__(f"{_FAILED}: {reason}")


def is_collective_error(error: Exception, given_up: bool = False) -> bool:
    """Return whether an error of a server only repeats that a collective failed there too.

    `given_up`: the group was given up before. A rank that has not joined by then cannot join.
    """
    return _FAILED in str(error) or (given_up and JOIN_FAILED in str(error))


def connect(address: str, port: int, limit: timedelta) -> TCPStore:
    """Return a connection to the store of a group, whose calls may take `limit`.

    Raises OSError at once if the store is closed: the group was given up before this rank came.
    TCPStore itself would try to connect again and again, for as long as its calls may take.
    """
    socket.create_connection((address, port), _CONNECT_S).close()
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
    store.set_timeout(limit)
    return store


class GroupMember:
    """A rank that has joined a weight group. NCCL's communicator is connected already.

    store: a connection of its own to the store of the group; backend: `nccl` for tensors on the
    current GPU, or `gloo`; limit: how long joining and leaving may take.
    """

    def __init__(
        self, store: Store, backend: str, *, world: int, rank: int, name: str, limit: timedelta
    ):
        self.store = PrefixStore(name, store)
        self._work: dist.Work | None = None
        # torch has no public call for a second group with a store and members of its own. SGLang
        # uses the same helper. In blocking-wait mode the group gets no watchdog.
        with environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            group, _ = c10d._new_process_group_helper(
                world,
                rank,
                [],
                c10d.Backend(backend),
                self.store,
                group_name=name,  # pyright: ignore[reportArgumentType]
                timeout=limit,
            )
        assert isinstance(group, dist.ProcessGroup)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        self._group: dist.ProcessGroup | None = group
        if backend != "gloo":
            try:
                self._connect(backend, rank, world, limit)
            except Exception as error:
                self.abort()
                raise CollectiveError(error) from error

    def _connect(self, backend: str, rank: int, world: int, limit: timedelta) -> None:
        assert self._group is not None
        # NCCL would wait for a missing rank without end, so all meet in the store first.
        self.store.set(f"met/{rank}", "")
        self.store.wait([f"met/{other}" for other in range(world)], limit)
        cuda = backend == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._group._get_backend(device).eager_connect_single_device(device)

    def broadcast(self, data: torch.Tensor, given_up: Callable[[], bool]) -> None:
        """Send `data` from rank 0, or receive it into `data`, and return when it is there.

        `given_up` is asked again and again. Raises CollectiveError when it says yes or when the
        backend fails. The group is of no use afterwards.
        """
        try:
            self._work = dist.broadcast(data, src=0, group=self._group, async_op=True)
            assert self._work is not None
            started = time.monotonic()
            while not self._work.is_completed():
                if given_up():
                    raise TimeoutError(GIVEN_UP)
                waited = time.monotonic() - started
                time.sleep(min(0.001, max(0.00005, waited / 20)))
            # A broadcast that failed has completed too. This raises its error.
            self._work.wait()
        except Exception as error:
            raise CollectiveError(error) from error

    def store_closed(self) -> bool:
        """Return whether the group has ended on trainer rank 0."""
        try:
            self.store.check(["met/0"])
        except RuntimeError:
            return True
        return False

    def abort(self) -> None:
        """Leave the group at once, without the others. A second call does nothing."""
        group, self._group = self._group, None
        if group is None:
            return
        c10d._abort_process_group(group)
        if self._work is not None and not self._work.is_completed():
            _unfinished.append((group, self._work))
