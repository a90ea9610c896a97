"""The trainer's checkpoint: Megatron's distributed format, `fully_reshardable`, so that any parallel sizes can take it up again.

It holds parameters, float32 master weights and Adam moments, the step of the optimizer and of the schedule, torch's random state, and
the caller's `extra`. The folder appears under its name only when all ranks have written their part and it is on disk.
"""

from __future__ import annotations

from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from areal_lite.trainer.files import publish_folder, scratch_folder


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded_state(model: torch.nn.Module, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    parameters = model.sharded_state_dict(metadata=metadata)
    return {
        "model": parameters,
        "optimizer": optimizer.sharded_state_dict(parameters, is_loading=is_loading, metadata=metadata),
    }


def save_checkpoint(folder: Path, model: torch.nn.Module, optimizer: Any, scheduler: Any, extra: dict[str, Any]) -> None:
    """Write `folder`, replacing what had that name. Every rank calls it."""
    scratch = [str(scratch_folder(folder)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(scratch, src=0)
    state = _sharded_state(model, optimizer, is_loading=False)
    state |= {"scheduler": scheduler.state_dict(), "random": torch.get_rng_state(), "extra": extra}
    # Megatron would start a manager process for this queue, for good, though a synchronous save never leaves this process.
    filesystem_async._results_queue = Queue()
    dist_checkpointing.save(state, scratch[0], content_metadata={"distrib_optim_sharding_type": "fully_reshardable"})
    dist.barrier()
    if dist.get_rank() == 0:
        publish_folder(Path(scratch[0]), folder)
    dist.barrier()


@torch.no_grad()
def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Take up the state in `folder`; return its `extra`. Raises ValueError when there is no checkpoint. Every rank calls it."""
    if not (folder / "metadata.json").is_file():
        raise ValueError(f"{folder}: not a trainer checkpoint")
    state = dist_checkpointing.load(_sharded_state(model, optimizer, is_loading=True), str(folder))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.num_steps = 0  # it counts on from where it is
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"])
    return state["extra"]
