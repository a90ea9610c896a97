"""The trainer's checkpoints: Megatron's distributed format, `fully_reshardable`, so that any parallel sizes can take one up again.

A checkpoint holds, for each of its parts (the policy, and a critic if there is one), parameters, float32 master weights, Adam moments and
the steps of optimizer and schedule; beside them torch's random state and the caller's `extra`. Invariants:

* A folder has its final name only when every rank's part is in it and on disk. An interrupted save leaves a hidden folder, never a bad one.
* The state is that of the moment of `save`, though it is written while training goes on: a thread of each rank writes a copy in host memory.
  Not a forked process, which is Megatron's way: it would outlive a killed trainer and go on writing where the next one does, and it can
  inherit locks that the threads of gloo, OpenMP and CUDA hold. Writing releases the interpreter's lock. Training waits for the copy only.
* What needs all ranks to agree (is it written? publish it) happens in the calls below, in the main thread: every rank makes the same ones.

The folder must be on a file system that all ranks see.
"""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint import CheckpointException

from areal_lite.megatron.optimizer import on_every_rank
from areal_lite.run_dir.paths import CHECKPOINT_MARKER
from areal_lite.run_dir.resume import checkpoint_steps, latest_checkpoint
from areal_lite.system.files import publish_folder, reading, remove_unread, scratch_folder

_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


class Part(Protocol):
    """What a checkpoint takes of an engine. `model`: all of it that this rank has, with Megatron's `sharded_state_dict`."""

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any


class Saving:
    """A checkpoint on its way to `folder`. Made when the state is copied; every rank makes one and calls its methods."""

    def __init__(self, folder: Path, parts: dict[str, Part], extra: dict[str, Any]):
        self.folder = folder
        scratch = [str(scratch_folder(folder)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(scratch, src=0)
        self.scratch = Path(scratch[0])
        state = _sharded_state(parts, is_loading=False) | {
            "random": torch.get_rng_state(),
            "extra": extra,
        }
        # Megatron would start a manager process for this queue, for good; ours never leaves the process.
        filesystem_async._results_queue = Queue()
        self.request: AsyncRequest = dist_checkpointing.save(
            state,
            scratch[0],
            sharded_strategy=TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            async_sharded_save=True,
            content_metadata=_FORMAT,
        )
        self.thread: Thread | None = None
        if self.request.async_fn is not None:  # this rank has something to write
            _, _, results = self.request.async_fn_args
            transforms, _ = self.request.async_fn.args
            self.thread = Thread(
                target=_write,
                args=(transforms, _host_copy(self.request, parts), results),
                daemon=True,
            )
            self.thread.start()

    def written(self) -> bool:
        """Whether every rank has written its part."""
        return on_every_rank(self.thread is None or not self.thread.is_alive())

    def publish(self) -> None:
        """Wait until it is written, then give it its name. Raises RuntimeError, on every rank, when any rank could not write."""
        if self.thread is not None:
            self.thread.join()
        try:
            for finalize in self.request.finalize_fns:
                finalize()
        except (
            CheckpointException
        ) as error:  # not an Exception, and known to rank 0 alone in detail
            raise RuntimeError(
                f"{self.folder}: this checkpoint could not be written; {error}"
            ) from error
        if dist.get_rank() == 0:
            publish_folder(self.scratch, self.folder)
        dist.barrier()


class Checkpoints:
    """A run's checkpoints, `folder`/step-N, at most one of them on its way. Every rank makes the same calls.

    keep: how many of the newest to keep, 0 for all. milestone_every: those of multiples of so many steps are kept for good; 0: none are.
    The newest complete one is never removed, nor one that a process is reading.
    """

    def __init__(
        self, folder: Path, parts: dict[str, Part], keep: int = 0, milestone_every: int = 0
    ):
        self.folder, self.parts, self.keep, self.milestone_every = (
            folder,
            parts,
            keep,
            milestone_every,
        )
        self.saving: Saving | None = None
        if dist.get_rank() == 0:  # what killed runs left
            for leftover in chain(folder.glob(".step-*.partial"), folder.glob(".step-*.old")):
                shutil.rmtree(leftover)
        dist.barrier()

    def save(self, step: int, extra: dict[str, Any]) -> None:
        """Start to write the state as it is now, with `extra` (plain data); waits for the previous one if that is still being written."""
        self.wait()
        self.saving = Saving(self.folder / f"step-{step}", self.parts, extra)

    def poll(self) -> None:
        """Publish what is being written if it is complete; returns at once otherwise. Called once a step."""
        if self.saving and self.saving.written():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self.saving:
            saving, self.saving = self.saving, None
            saving.publish()
            if dist.get_rank() == 0:
                for step in obsolete(
                    checkpoint_steps(self.folder), self.keep, self.milestone_every
                ):
                    remove_unread(self.folder / f"step-{step}" / CHECKPOINT_MARKER)

    def load(self, folder: Path) -> dict[str, Any]:
        """Take up `folder`; returns its `extra`. Raises ValueError when it is no checkpoint of the same parts."""
        return load_checkpoint(folder, self.parts)

    def resume(self) -> int:
        """Take up the newest complete one, if there is one; returns the step to go on from."""
        newest = latest_checkpoint(self.folder)
        return self.load(newest)["step"] if newest else 0


def obsolete(steps: list[int], keep: int, milestone_every: int) -> list[int]:
    """Which of `steps`, ascending, go when the `keep` newest (0: all) and the multiples of `milestone_every` (0: none) stay."""
    return (
        [step for step in steps[:-keep] if not (milestone_every and step % milestone_every == 0)]
        if keep
        else []
    )


@torch.no_grad()
def load_checkpoint(folder: Path, parts: dict[str, Part]) -> dict[str, Any]:
    """Take up the state in `folder`; return its `extra`. Raises ValueError when it is no checkpoint of the same parts. Every rank calls it."""
    if not (folder / CHECKPOINT_MARKER).is_file():
        raise ValueError(f"{folder}: not a trainer checkpoint")
    with reading(folder / CHECKPOINT_MARKER):
        common = dist_checkpointing.load_common_state_dict(str(folder))
        if missing := parts.keys() - common.keys():
            raise ValueError(f"{folder}: this checkpoint holds no {', '.join(sorted(missing))}")
        state = dist_checkpointing.load(_sharded_state(parts, is_loading=True), str(folder))
    for name, part in parts.items():
        part.model.load_state_dict(state[name]["model"])
        # Of a parameter group only its step is state; rates, betas and decay are this run's, which may be another's that goes on from here.
        settings = [
            {key: value for key, value in group.items() if key not in ("params", "step")}
            for group in part.optimizer.param_groups
        ]
        part.optimizer.load_state_dict(state[name]["optimizer"])
        for group, own in zip(part.optimizer.param_groups, settings, strict=True):
            group.update(own)
        part.scheduler.num_steps = 0  # it counts on from where it is
        part.scheduler.load_state_dict(state[name]["scheduler"])
    torch.set_rng_state(state["random"])
    return state["extra"]


def _sharded_state(parts: dict[str, Part], is_loading: bool) -> dict[str, Any]:
    metadata = _FORMAT | {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
    }
    state = {}
    for name, part in parts.items():
        if not any(one.optimizer.state for one in part.optimizer.chained_optimizers):
            part.optimizer.load_state_dict(
                part.optimizer.state_dict()
            )  # before the first update there are no moments: this makes them, 0
        model = part.model.sharded_state_dict(metadata=metadata)
        optimizer = part.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        state[name] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": part.scheduler.state_dict(),
        }
        add_prefix_for_sharding(state[name], f"{name}.")
    return state


def _host_copy(request: AsyncRequest, parts: dict[str, Part]) -> list:
    """Megatron's write buckets with every tensor in host memory and none shared with a model. Optimizer state has been copied already."""
    live = {
        t.untyped_storage().data_ptr()
        for part in parts.values()
        for t in chain(part.model.parameters(), part.model.buffers())
    }
    return [
        (
            file,
            key,
            (
                others,
                [
                    (item, t.clone() if t.untyped_storage().data_ptr() in live else t)
                    for item, t in tensors
                ],
            ),
        )
        for file, key, (others, tensors) in request.preload_fn()
    ]


def _write(transforms: list, buckets: list, results: Queue) -> None:
    """Write and flush `buckets`; put what Megatron expects of its writer processes into `results`, or the exception that stopped it."""
    written: dict[int, list] = {}
    for index, bucket in enumerate(buckets):
        outcome, running = Queue(), Queue()
        running.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, outcome, running, use_fsync=True
        )
        _, written[index] = outcome.get()
        if isinstance(written[index], Exception):
            return results.put(written[index])
    results.put(written)
