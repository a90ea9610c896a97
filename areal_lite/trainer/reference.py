"""Reference: a frozen policy on the policy's engine. No gradients, no optimizer; on a GPU its weights wait in CPU memory between uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.trainer.head import language_head
from areal_lite.trainer.packing import MicroBatch
from areal_lite.trainer.parallel_model import ParallelModel


class Reference(ParallelModel):
    """Built with the TrainerConfig of the policy: layout, device and dtype are the same."""

    def __init__(self, config: TrainerConfig, model_path: str | Path, seed: int = 0):
        super().__init__(config, model_path, seed)
        self._parameters = [p.requires_grad_(False) for p in self.model.parameters()]
        self._waiting = [p.data.to("cpu").pin_memory() for p in self._parameters] if self.device.type == "cuda" else []
        self._rest()

    def logprobs(self, microbatches: Sequence[MicroBatch], temperature: float = 1.0) -> Tensor:
        """float32 [T] on the engine's device, as `MegatronEngine.logprobs` gives them."""
        for parameter, waiting in zip(self._parameters, self._waiting):
            parameter.data = waiting.to(self.device, non_blocking=True)
        try:
            return self.outputs(microbatches, language_head(temperature, self.hf_config.vocab_size, self.config.fp32_head))
        finally:
            self._rest()

    def _rest(self) -> None:
        """Give up the GPU memory of the weights."""
        for parameter, waiting in zip(self._parameters, self._waiting):
            parameter.data = waiting
