"""An SGLang plugin: with `server.deterministic`, greedy requests do not change the others' tokens.

SGLang samples from sorted probabilities as soon as one request of a batch is greedy, which it takes
for top-k sampling. It then hashes the rank of a token in place of the token, so that every other
request of the batch gets other tokens for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SAMPLER = "sglang.srt.layers.sampler.Sampler._sample_from_probs"


def install() -> None:
    """Register the hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SAMPLER, _sample_by_token, HookType.AROUND)


def _sample_by_token(
    original: Callable,
    self: Any,
    probs: Any,
    sampling_info: Any,
    positions: Any,
    simple_sampling_case: bool,
) -> tuple[Any, Any]:
    """Sample seeded requests over the whole vocabulary by token, greedy ones without noise."""
    import torch
    from sglang.srt.layers.sampler import sampling_from_probs_torch
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    info = sampling_info
    tokens, capture = original(self, probs, info, positions, simple_sampling_case)
    if simple_sampling_case or info.sampling_seed is None or info.need_top_p_sampling:
        return tokens, capture
    seeded = sampling_from_probs_torch(probs, info.sampling_seed, positions)
    tokens = torch.where(info.top_ks == TOP_K_ALL, seeded, tokens)
    return torch.where(info.top_ks == 1, probs.argmax(-1).to(tokens.dtype), tokens), capture
