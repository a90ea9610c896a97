"""An SGLang plugin: the routes of a retracted request are those of its own forward passes.

SGLang keeps the route of a token beside its KV cache. A request that is retracted, by a push or
for lack of memory, loses both. Its tokens are computed again, perhaps by newer weights, and SGLang
would return the routes of that computation for tokens that older weights sampled. This plugin keeps
the routes that a request has when it is retracted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_RELEASE = "sglang.srt.managers.schedule_batch.release_req"
_COLLECT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)


def install() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_RELEASE, _keep_routes, HookType.AROUND)
    HookRegistry.register(_COLLECT, _return_kept_routes, HookType.AROUND)


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
