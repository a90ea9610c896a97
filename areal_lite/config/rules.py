"""Rules of one section that need more than one of its fields."""

from __future__ import annotations

from areal_lite.config.schema import TrainerConfig


def check_trainer(trainer: TrainerConfig) -> None:
    _parallel(trainer)
    _schedule(trainer)
    if trainer.batch_groups % (trainer.data_parallel * trainer.minibatches):
        raise ValueError(
            f"trainer.batch_groups={trainer.batch_groups} cannot be dealt equally to trainer.data_parallel={trainer.data_parallel} ranks"
            f" x trainer.minibatches={trainer.minibatches}: make it a multiple of {trainer.data_parallel * trainer.minibatches}"
        )


def _schedule(trainer: TrainerConfig) -> None:
    updates = trainer.steps * trainer.minibatches
    if not 0 <= trainer.lr_warmup_steps <= updates:
        raise ValueError(
            f"trainer.lr_warmup_steps={trainer.lr_warmup_steps}: must be between 0 and the {updates} updates of the run (trainer.steps x trainer.minibatches)"
        )
    if (
        trainer.lr_decay_steps is not None
        and not 0 < trainer.lr_decay_steps <= updates - trainer.lr_warmup_steps
    ):
        raise ValueError(
            f"trainer.lr_decay_steps={trainer.lr_decay_steps}: must be between 1 and the {updates - trainer.lr_warmup_steps} updates after the warm-up"
        )
    if not 0 <= trainer.min_lr <= trainer.lr:
        raise ValueError(
            f"trainer.min_lr={trainer.min_lr}: must be between 0 and trainer.lr={trainer.lr}"
        )
    for key in ("save_every", "keep_checkpoints", "milestone_every"):
        if getattr(trainer, key) < 0:
            raise ValueError(f"trainer.{key}={getattr(trainer, key)}: must not be negative")


def _parallel(trainer: TrainerConfig) -> None:
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        raise ValueError(
            "trainer.sequence_parallel=true divides tokens among tensor-parallel ranks: set trainer.tensor_parallel to 2 or more"
        )
    if trainer.virtual_pipeline > 1 and trainer.pipeline_parallel == 1:
        raise ValueError(
            f"trainer.virtual_pipeline={trainer.virtual_pipeline} interleaves pipeline stages: set trainer.pipeline_parallel to 2 or more"
        )
    ranks = trainer.tensor_parallel * trainer.context_parallel * trainer.data_parallel
    if ranks % trainer.expert_parallel:
        raise ValueError(
            f"trainer.expert_parallel={trainer.expert_parallel} does not divide trainer.tensor_parallel={trainer.tensor_parallel}"
            f" x context_parallel={trainer.context_parallel} x data_parallel={trainer.data_parallel}, the ranks that it deals experts to"
        )
