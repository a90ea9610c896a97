"""The state of a checkpoint's parts: which tensors are written, and how they are restored.

`checkpoint.py` has the files.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from areal_lite.config import LoraConfig, TrainerConfig
from areal_lite.megatron.model import Chunks
from areal_lite.megatron.optimizer import is_sharded

FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


class Part(Protocol):
    """One part of a checkpoint: a model on this rank with its optimizer and schedule."""

    config: TrainerConfig
    model: Chunks
    optimizer: Any
    scheduler: Any


def format_metadata() -> dict[str, Any]:
    """Return what Megatron needs to shard a state."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FORMAT | {"dp_cp_group": group}


def sharded_state(parts: Mapping[str, Part], is_loading: bool) -> dict[str, Any]:
    """Return the state of all parts by name, to be saved or to be filled. Every rank calls it."""
    metadata = format_metadata()
    state: dict[str, Any] = {}
    for name, part in parts.items():
        if is_sharded(part.config):
            _make_moments(part.optimizer)
        model = part.model.sharded_state_dict(metadata=metadata)
        state[name] = {
            "model": model,
            "optimizer": part.optimizer.sharded_state_dict(
                model, is_loading=is_loading, metadata=metadata
            ),
            "optimizer_name": part.config.optimizer,
            "lora": asdict(part.config.lora) if part.config.lora.rank else None,
            "scheduler": part.scheduler.state_dict(),
        }
        add_prefix_for_sharding(state[name], f"{name}.")
    return state


def _make_moments(optimizer: Any) -> None:
    """Make the moments of Adam, as zeros. There are none before the first update."""
    if any(one.optimizer.state for one in optimizer.chained_optimizers):
        return
    optimizer.load_state_dict(optimizer.state_dict())  # makes them without setting them
    for one in optimizer.chained_optimizers:
        for moments in one.optimizer.state.values():
            moments["exp_avg"].zero_()
            moments["exp_avg_sq"].zero_()


def check_state(folder: Path, common: dict[str, Any], parts: Mapping[str, Part]) -> None:
    """Check a checkpoint against the parts that are to be restored.

    Raises ValueError if it lacks a part, if another optimizer wrote it, or if its adapters are
    others.

    Args:
        folder: the checkpoint.
        common: its state without tensors.
        parts: by name.
    """
    if missing := parts.keys() - common.keys():
        raise ValueError(f"{folder}: this checkpoint holds no {', '.join(sorted(missing))}")
    for name, part in parts.items():
        wrote, has = common[name].get("optimizer_name", "adam"), part.config.optimizer
        if wrote != has:
            raise ValueError(
                f"{folder}: the state of trainer.optimizer={has} cannot be read from a checkpoint "
                f"of trainer.optimizer={wrote}: set it to {wrote}, or start a new run from the "
                "checkpoint's weights (areal-lite export)"
            )
        _check_adapters(folder, common[name].get("lora"), part.config.lora)


def _check_adapters(folder: Path, wrote: dict[str, Any] | None, own: LoraConfig) -> None:
    has = asdict(own) if own.rank else None
    if wrote != has:
        raise ValueError(
            f"{folder}: this checkpoint was written with trainer.lora={wrote or 'off'} and cannot "
            f"be continued with {has or 'off'}: set the same, or start a new run from the "
            "checkpoint's weights (areal-lite export)"
        )


def restore(part: Part, state: dict[str, Any]) -> None:
    """Set a part to its loaded state."""
    part.model.load_state_dict(state["model"])
    _load_optimizer(part.optimizer, state["optimizer"])
    part.scheduler.num_steps = 0  # loading adds the position to it
    part.scheduler.load_state_dict(state["scheduler"])


def live_storages(parts: Mapping[str, Part]) -> set[int]:
    """Return the addresses of tensors that change in place and are in a state as they are.

    Sharded optimizer state is gathered, so it is in a state as a copy.
    """
    return {
        tensor.untyped_storage().data_ptr()
        for part in parts.values()
        for tensor in chain(
            part.model.parameters(),
            part.model.buffers(),
            *(one.get_parameters() for one in part.optimizer.chained_optimizers),
        )
    }


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load the optimizer's state; rates, betas and decay stay those of this run's configuration."""
    settings = [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
