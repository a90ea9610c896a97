"""The models of a training step on this rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from areal_lite.algo.objective import Objective
from areal_lite.config import LoraConfig, TrainConfig, reference_folders
from areal_lite.megatron.policy import Critic, Policy, TrainableModel
from areal_lite.megatron.reference import (
    BaseReference,
    CachedReference,
    Reference,
    SourceReferences,
)


@dataclass
class Models:
    """The policy, and the models that its objective needs."""

    policy: Policy
    reference: SourceReferences | CachedReference | None = None
    critic: Critic | None = None
    # Gradients and optimizer state wait in host memory between steps; servers use the device.
    offload: bool = False

    @property
    def trained(self) -> dict[str, TrainableModel]:
        """Return the models that a checkpoint holds, by name."""
        models: dict[str, TrainableModel] = {"policy": self.policy}
        if self.critic:
            models["critic"] = self.critic
        return models

    def leave_device(self) -> None:
        """Move gradient buffers and optimizer state to host memory, if `offload`."""
        if self.offload:
            for model in self.trained.values():
                model.offload()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep gradient buffers and optimizer state on the device inside the block."""
        if self.offload:
            for model in self.trained.values():
                model.onload()
        yield
        self.leave_device()


def build_models(config: TrainConfig, objective: Objective) -> Models:
    """Load the models that `objective` needs.

    The critic starts from the policy's weights; its learning-rate schedule has the policy's shape.
    """
    trainer, algo = config.trainer, config.algo
    model = Path(config.model)
    policy = Policy(trainer, model, config.seed, routing_replay=algo.routing_replay)
    models = Models(policy, offload=trainer.offload)
    if objective.needs_reference:
        models.reference = _references(config, policy)
        if config.buffer.replay.capacity:
            models.reference = CachedReference(models.reference)
    if objective.needs_critic:
        lr, least = algo.critic.lr, trainer.min_lr * algo.critic.lr / trainer.lr
        models.critic = Critic(replace(trainer, lr=lr, min_lr=least), model, config.seed)
    return models


def _references(config: TrainConfig, policy: Policy) -> SourceReferences:
    """Load the reference policy of each data source. A folder is loaded once."""
    folders = reference_folders(config)
    loaded: dict[str, Reference | BaseReference] = {}
    for folder in folders.values():
        # Validation refuses an objective that needs a reference and has none.
        assert folder is not None
        if folder not in loaded:
            loaded[folder] = (
                BaseReference(policy)
                if config.is_base(folder)
                else Reference(replace(config.trainer, lora=LoraConfig()), folder)
            )
    return SourceReferences({name: loaded[str(folder)] for name, folder in folders.items()})
