"""Corrections of SGLang's sampling, and of its report about a sampled token.

* Greedy requests change no other request's tokens under `server.deterministic`. SGLang takes greedy
  for top-k sampling, and samples the whole batch from sorted probabilities. It then hashes the rank
  of a token in place of the token: every other request gets other tokens for the same seed.
* A retracted request returns the routes of its own forward passes. SGLang keeps routes beside the
  KV cache, and a request that is retracted, by a push or for lack of memory, loses both. Its tokens
  are computed again, perhaps by newer weights, and SGLang would return the routes of that
  computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SAMPLER = "sglang.srt.layers.sampler.Sampler._sample_from_probs"
_RELEASE = "sglang.srt.managers.schedule_batch.release_req"
_COLLECT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)


def hooks() -> dict[str, Callable]:
    """Return the functions that run around SGLang's, by its names."""
    return {
        _SAMPLER: _sample_by_token,
        _RELEASE: _keep_routes,
        _COLLECT: _return_kept_routes,
    }


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


def _keep_routes(original: Callable, *, req: Any, req_to_token_pool: Any, **rest: Any) -> bool:
    """Retract a request, and keep the routes with which its tokens were sampled."""
    import torch
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    capturer = get_global_experts_capturer()
    if req.return_routed_experts and capturer is not None and req.output_ids:
        kept = getattr(req, "kept_routes", None)
        first = req.routed_experts_start_len + (0 if kept is None else len(kept))
        newer = capturer.get_topk(
            req_pool_idx=req.kv.req_pool_idx,
            seqlen=len(req.origin_input_ids) + len(req.output_ids),
            req_to_token_pool=req_to_token_pool,
            start_len=first,
        )
        req.kept_routes = newer if kept is None else torch.cat((kept, newer))
    return original(req=req, req_to_token_pool=req_to_token_pool, **rest)


def _return_kept_routes(original: Callable, self: Any, req: Any) -> None:
    """Collect the routes of a finished request, with the kept ones for its first tokens."""
    original(self, req)
    kept = getattr(req, "kept_routes", None)
    if kept is not None and req.routed_experts is not None:
        count = min(len(kept), len(req.routed_experts))
        req.routed_experts[:count] = kept[:count]
