"""A router alone, without process groups."""

from types import SimpleNamespace
from typing import Any, cast

import torch

import areal_lite.megatron  # noqa: F401  (prepares megatron.core)
from areal_lite.megatron.experts import Router


def make_router(
    weight: torch.Tensor,
    top_k: int,
    over_all: bool = False,
    bias: torch.Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
) -> Router:
    """Make a router of `weight` [experts, hidden]; with a bias, its scores are sigmoids.

    groups: how many there are, and of how many of them a token has experts.
    """
    config = SimpleNamespace(
        num_moe_experts=weight.shape[0],
        hidden_size=weight.shape[1],
        moe_router_topk=top_k,
        moe_router_pre_softmax=over_all,
        moe_router_score_function="softmax" if bias is None else "sigmoid",
        moe_router_num_groups=groups[0],
        moe_router_group_topk=groups[1],
        moe_router_topk_scaling_factor=None if bias is None else 2.5,
        add_bias_linear=False,
        params_dtype=weight.dtype,
        sequence_parallel=False,
    )
    router = Router(cast(Any, config))
    router.weight.data = weight
    if router.correction is not None and bias is not None:
        router.correction.data = bias
    return router
