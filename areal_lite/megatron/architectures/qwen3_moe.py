"""Qwen3 mixture of experts: `num_experts` gated MLPs in every layer.

A token goes to the `num_experts_per_tok` experts with the largest router probabilities. SGLang puts
experts in every layer and gives the model its own output layer, whatever the configuration says. A
configuration that says otherwise is refused, because the servers would compute another model.
"""

from typing import Any

from transformers import PretrainedConfig

from areal_lite.megatron.architectures.common import ATTENTION, EXPERTS, QK_NORM, Architecture


def check(hf: PretrainedConfig) -> None:
    """Raise ValueError for a model that SGLang would compute differently or that cannot train."""
    if hf.tie_word_embeddings:
        raise ValueError(
            "tie_word_embeddings=true is not supported for qwen3_moe, because SGLang does not"
            " share them: use a checkpoint with an lm_head"
        )
    if hf.mlp_only_layers or hf.decoder_sparse_step != 1:
        raise ValueError(
            f"mlp_only_layers={hf.mlp_only_layers} and decoder_sparse_step="
            f"{hf.decoder_sparse_step} are not supported: SGLang has experts in every layer"
        )
    if hf.norm_topk_prob and hf.num_experts_per_tok == 1:
        raise ValueError(
            "num_experts_per_tok=1 with norm_topk_prob=true leaves the router without a gradient:"
            " set norm_topk_prob to false"
        )


def fields(hf: PretrainedConfig) -> dict[str, Any]:
    """Describe the experts. There is no balancing loss: pre-training has balanced their load."""
    return {
        "qk_layernorm": True,
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        # The weights of the chosen experts are their probabilities among all experts (true), or
        # among the chosen ones, which then sum to 1 (false).
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


QWEN3_MOE = Architecture(
    model_type="qwen3_moe", layer=ATTENTION | QK_NORM | EXPERTS, fields=fields, check=check
)
