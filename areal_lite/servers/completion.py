"""TODO docstring."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy. `stop_token_ids`: the model's end tokens; the one that stops a sequence is part of it, with a log-prob."""

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"rollout.max_new_tokens is {self.max_new_tokens}: it must be at least 1"
            )
        if self.temperature < 0:
            raise ValueError(
                f"rollout.temperature is {self.temperature}: it must be 0 (greedy) or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """What one request brought: tokens int32 [n], logprobs float32 [n] (NaN where the server had none), versions int32 [n].

    `kv_version`: the version under which it was sent, the oldest whose cached prefixes may serve it."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    kv_version: int = -1


@dataclass(slots=True)
class Completion:
    """A completion in the making: the chunks so far. `finish_reason` is `abort` until it has ended with `stop` or `length`."""

    chunks: list[GenerationChunk] = field(default_factory=list)
    requests: int = 0
    finish_reason: str = "abort"

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]"""
        return np.concatenate([np.empty(0, np.int32), *(p.tokens for p in self.chunks)])

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [n]"""
        return np.concatenate([np.empty(0, np.float32), *(p.logprobs for p in self.chunks)])

    @property
    def versions(self) -> np.ndarray:
        """int32 [n]"""
        return np.concatenate([np.empty(0, np.int32), *(p.versions for p in self.chunks)])
