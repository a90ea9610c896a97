"""Qwen3 mixture of experts: of `num_experts` gated MLPs a token takes the `num_experts_per_tok` with the largest router probability.

SGLang has experts in every layer and an output layer of its own, whatever the configuration says; a model that is otherwise is refused,
because the servers would compute another one.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from areal_lite.megatron.architectures.common import ATTENTION, EXPERTS, QK_NORM, Architecture


def check(hf: PretrainedConfig) -> None:
    if hf.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings=true is not supported for qwen3_moe, SGLang does not share them: use a checkpoint with an lm_head"
        )
    if hf.mlp_only_layers or hf.decoder_sparse_step != 1:
        raise ValueError(
            f"mlp_only_layers={hf.mlp_only_layers} and decoder_sparse_step={hf.decoder_sparse_step} are not supported:"
            " SGLang has experts in every layer"
        )
    if hf.norm_topk_prob and hf.num_experts_per_tok == 1:
        raise ValueError(
            "num_experts_per_tok=1 with norm_topk_prob=true leaves the router without a gradient: set norm_topk_prob to false"
        )


def fields(hf: PretrainedConfig) -> dict[str, Any]:
    """No balancing loss: the experts' load is left as pre-training made it."""
    return {
        "qk_layernorm": True,
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        # Weights of the chosen experts: their probabilities among all, or among the chosen ones, which then sum to 1.
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


QWEN3_MOE = Architecture("qwen3_moe", ATTENTION | QK_NORM | EXPERTS, fields, check)
