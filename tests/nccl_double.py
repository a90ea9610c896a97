"""A process group on the CPU that fails as ProcessGroupNCCL does, where gloo behaves differently.

The statements are those of torch 2.13, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:

* A broadcast with a dead or stopped peer hangs. Over NVLink and PCIe nobody reports an error.
* `WorkNCCL::isCompleted` is true after an asynchronous error, and after an abort: it asks whether
  there is an exception or the kernel has ended. An aborted kernel has ended, without an exception.
* `WorkNCCL::wait` makes the current stream wait for the kernel, then throws the exception if there
  is one. Called too early, it leaves the stream blocked.
* `abort` concerns this rank alone. The kernels of the other ranks go on.
* `shutdown` finalizes the communicators, which waits for what is in flight.
* A group whose TORCH_NCCL_BLOCKING_WAIT is not set has a watchdog, which ends the process.
* `eagerConnectSingleDevice` connects all ranks; otherwise the first collective does.

Data travels through the store of the group. Two variables make ranks fail:
NCCL_DOUBLE_CONNECT_ERROR when they connect, NCCL_DOUBLE_ASYNC_ERROR in the first broadcast.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

NAME = "nccl_double"


class DoubleWork:
    """A broadcast along a ring: each rank passes the data on to the next."""

    def __init__(self, group: NcclDouble, tensor: torch.Tensor, root: int, sequence: int):
        assert root == 0
        self.group, self.tensor, self.key = group, tensor, f"broadcast/{sequence}"
        self.arrived = False
        self.error = os.environ.get("NCCL_DOUBLE_ASYNC_ERROR")
        if group.rank() == root:
            group.store.set(f"{self.key}/0", tensor.numpy().tobytes())

    def is_completed(self) -> bool:
        return bool(self.error) or self.group.aborted or self._transferred()

    def _transferred(self) -> bool:
        store, rank = self.group.store, self.group.rank()
        try:
            if rank == 0:
                return store.check([f"{self.key}/1"])
            if not self.arrived and store.check([f"{self.key}/{rank - 1}"]):
                data = store.get(f"{self.key}/{rank - 1}")
                self.tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
                store.set(f"{self.key}/{rank}", data)
                self.arrived = True
        except RuntimeError:  # the store has closed, of which a kernel knows nothing
            return False
        return self.arrived

    def wait(self) -> bool:
        if self.error:
            raise RuntimeError(f"NCCL error: {self.error}")
        if not self.is_completed():
            threading.Event().wait()
        return True


class NcclDouble(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1", "the watchdog ends the process"
        self.store, self.aborted, self.connected, self.sequence = store, False, False, 0

    # A ProcessGroup keeps its name in its backend, and this one has none.
    def _set_group_name(self, name: str) -> None:
        self.name_ = name

    @property
    def group_name(self) -> str:
        return self.name_

    def _get_backend(self, device: torch.device) -> NcclDouble:
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        if error := os.environ.get("NCCL_DOUBLE_CONNECT_ERROR"):
            raise RuntimeError(f"NCCL error: {error}")
        self.store.add("connected", 1)
        self.connected = True

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> DoubleWork:
        assert self.connected, "the communicator would be made within the pause"
        assert options.asyncOp, "the kernel would run on the stream of everything else"
        self.sequence += 1
        return DoubleWork(self, tensors[0], options.rootRank, self.sequence)

    def abort(self) -> None:
        self.aborted = True

    def shutdown(self) -> None:
        threading.Event().wait()


def register() -> None:
    dist.Backend.register_backend(NAME, NcclDouble, devices=["cpu"])
