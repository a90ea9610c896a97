"""Reference: a frozen policy on the policy's engine, one for each data source, and their cache."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.megatron.lora import without_adapters
from areal_lite.megatron.policy import ParallelModel, Policy
from areal_lite.train_batch import TrainBatch, source_key

_CACHED_TOKENS = 2**24  # 8 bytes each, for token and log-prob


class Reference(ParallelModel):
    """A model without gradients and optimizer; layout, device and dtype are the policy's.

    On a GPU its weights wait in CPU memory between calls.
    """

    def __init__(self, config: TrainerConfig, model_path: str | Path):
        super().__init__(config, model_path, seed=0)
        self._parameters = [p.requires_grad_(False) for p in self.model.parameters()]
        self._waiting: list[Tensor] = []
        if self.device.type == "cuda":
            self._waiting = [p.data.to("cpu").pin_memory() for p in self._parameters]
        self._release()

    def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> Tensor:
        """Compute the log-probs of sampled tokens of `batch`: float32 [T], others 0."""
        for parameter, waiting in zip(self._parameters, self._waiting):
            parameter.data = waiting.to(self.device, non_blocking=True)
        try:
            microbatches = self.microbatches(batch, batch.sampled)
            return self.outputs(microbatches, self.language_head(temperature))[0]
        finally:
            self._release()

    def _release(self) -> None:
        for parameter, waiting in zip(self._parameters, self._waiting):
            parameter.data = waiting


class BaseReference:
    """The model under a policy's adapters: the policy before training. It needs no memory."""

    def __init__(self, policy: Policy):
        self._policy = policy

    def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> Tensor:
        """Compute the log-probs of sampled tokens of `batch`: float32 [T], others 0."""
        with without_adapters(self._policy.chunks):
            return self._policy.logprobs(
                self._policy.microbatches(batch, batch.sampled), temperature
            )


class SourceReferences:
    """The references of the data sources. Each scores the sequences of its sources."""

    def __init__(self, references: Mapping[str, Reference | BaseReference]):
        """Take the references by the names of sources. Raises ValueError for equal checksums."""
        self._sources: dict[Reference | BaseReference, list[int]] = {}
        for name, reference in references.items():
            self._sources.setdefault(reference, []).append(source_key(name))
        if len({key for keys in self._sources.values() for key in keys}) < len(references):
            raise ValueError(
                f"data.sources: {', '.join(references)} have the same checksums: rename one of them"
            )

    def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> Tensor:
        """Compute the log-probs of sampled tokens of `batch`: float32 [T], others 0.

        Raises ValueError for a sequence of a source that has no reference here.
        """
        if len(self._sources) == 1:
            return next(iter(self._sources)).logprobs(batch, temperature)
        if not np.isin(batch.source_keys, list(chain(*self._sources.values()))).all():
            raise ValueError("data.sources: the batch has prompts of a source that is not there")
        result = torch.zeros(len(batch.tokens))
        # With expert parallelism all ranks compute together, whatever sources each of them has.
        shortest = [int(np.argmin(batch.lengths))]
        for reference, keys in self._sources.items():
            own = np.flatnonzero(np.isin(batch.source_keys, keys))
            chosen = own if len(own) else shortest
            computed = reference.logprobs(batch.select(chosen), temperature)
            result = result.to(computed.device)
            if len(own):
                result[torch.from_numpy(batch.token_indices(own)).to(computed.device)] = computed
        return result


class CachedReference:
    """A reference that keeps log-probs of at most `max_tokens` tokens, those used last.

    It serves replay, which draws a sequence repeatedly.
    """

    def __init__(
        self,
        reference: Reference | BaseReference | SourceReferences,
        max_tokens: int = _CACHED_TOKENS,
    ):
        self._reference = reference
        self._max_tokens = max_tokens
        self._known: dict[bytes, np.ndarray] = {}  # sequence -> log-probs, last used last

    def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> Tensor:
        """Return what `Reference.logprobs` returns. Every call has the same `temperature`."""
        ends, tokens, sampled = batch.cu_seqlens, batch.tokens, batch.sampled
        keys = [
            b"".join(x.tobytes() for x in (source, tokens[at], sampled[at]))
            for source, at in zip(batch.source_keys, map(slice, ends, ends[1:]))
        ]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        # At least one sequence is computed: with expert parallelism all ranks compute together,
        # whatever each of them knows.
        shortest = int(np.argmin(batch.lengths))
        new = sorted(i for key, i in first.items() if key not in self._known) or [shortest]
        computed = self._reference.logprobs(batch.select(new), temperature)
        ends = np.cumsum(batch.lengths[new])[:-1]
        for i, values in zip(new, np.split(computed.cpu().numpy(), ends)):
            self._known[keys[i]] = values.copy()
        for key in first:
            self._known[key] = self._known.pop(key)
        result = np.concatenate([self._known[key] for key in keys])
        tokens = sum(map(len, self._known.values()))
        while tokens > self._max_tokens:
            tokens -= len(self._known.pop(next(iter(self._known))))
        return torch.from_numpy(result).to(computed.device)
