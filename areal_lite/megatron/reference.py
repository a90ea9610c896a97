"""Reference: a frozen policy on the policy's engine. No gradients, no optimizer; on a GPU its weights wait in CPU memory between uses.

CachedReference: the same, each sequence computed once. For a replay buffer, which draws a sequence again and again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.megatron.head import language_head
from areal_lite.megatron.parallel_model import ParallelModel
from areal_lite.trajectory import TrainBatch

_REMEMBERED_TOKENS = 2**24  # 8 bytes each, tokens and log-probs


class Reference(ParallelModel):
    """Built with the TrainerConfig of the policy: layout, device and dtype are the same."""

    def __init__(self, config: TrainerConfig, model_path: str | Path, seed: int = 0):
        super().__init__(config, model_path, seed)
        self._parameters = [p.requires_grad_(False) for p in self.model.parameters()]
        self._waiting = (
            [p.data.to("cpu").pin_memory() for p in self._parameters]
            if self.device.type == "cuda"
            else []
        )
        self._rest()

    def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> Tensor:
        """float32 [T] on the engine's device, as `Policy.logprobs` gives them."""
        for parameter, waiting in zip(self._parameters, self._waiting):
            parameter.data = waiting.to(self.device, non_blocking=True)
        try:
            return self.outputs(
                self.microbatches(batch),
                language_head(temperature, self.hf_config.vocab_size, self.config.fp32_head),
            )
        finally:
            self._rest()

    def _rest(self) -> None:
        """Give up the GPU memory of the weights."""
        for parameter, waiting in zip(self._parameters, self._waiting):
            parameter.data = waiting


class CachedReference:
    """Stands where a Reference does. The ranks of a model remember alike, as they see the same batches."""

    def __init__(self, reference: Reference, max_tokens: int = _REMEMBERED_TOKENS):
        """Beyond `max_tokens` those used longest ago are forgotten."""
        self._reference, self._max_tokens = reference, max_tokens
        self._known: dict[bytes, np.ndarray] = {}  # by the tokens; the one used last is last
        self._tokens = 0

    def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> Tensor:
        """As Reference.logprobs; `temperature` is the same in every call."""
        ends = batch.cu_seqlens
        keys = [batch.tokens[ends[i] : ends[i + 1]].tobytes() for i in range(batch.num_sequences)]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        # At least one: with expert parallelism the ranks compute together, whatever each of them knows.
        new = sorted(i for key, i in first.items() if key not in self._known) or [
            int(np.argmin(batch.lengths))
        ]
        computed = self._reference.logprobs(batch.select(new), temperature)
        for i, values in zip(
            new, np.split(computed.cpu().numpy(), np.cumsum(batch.lengths[new])[:-1])
        ):
            self._remember(keys[i], values.copy())
        for key in first:
            self._known[key] = self._known.pop(key)
        result = np.concatenate([self._known[key] for key in keys])
        while self._tokens > self._max_tokens:
            self._tokens -= len(self._known.pop(next(iter(self._known))))
        return torch.from_numpy(result).to(computed.device)

    def _remember(self, key: bytes, values: np.ndarray) -> None:
        self._tokens += len(values) - len(self._known.pop(key, ()))
        self._known[key] = values
