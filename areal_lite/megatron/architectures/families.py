"""The families of models, as a table: model type -> Hugging Face tensors and Megatron's fields.

To add one:

1. Add an entry to `ARCHITECTURES`. A parameter that no other family has also needs its size in
   `tools/memory.py`.
2. Add its name to the choices of `architecture` in `quickstart/command.py`, which makes tiny models
   of it. Settings of its own go into `quickstart/make_model.py`. Then write
   docs/configuration.md again: `python -m areal_lite.tools.reference > docs/configuration.md`.
3. Add a model to `MODELS` and `RUNS` in tests/ranks/test_architectures.py, which compares it
   with transformers, and a case to `test_supported` in test_hf_architectures.py. The tests that run
   over `ARCHITECTURES`, such as test_hf_layouts.py, find it by themselves.
4. Name it in README.md and in docs/training.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from areal_lite.megatron.architectures.parameters import (
    QKV,
    GatedColumnParallel,
    Parameter,
    Replicated,
    RowParallel,
    VocabParallel,
)

Mapping = dict[str, Parameter]

# Once in a model.
EMBEDDINGS: Mapping = {
    "embedding.word_embeddings.weight": VocabParallel("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": Replicated("model.norm.weight"),
    "output_layer.weight": VocabParallel("lm_head.weight"),
}

# Below decoder.layers.{layer} in Megatron and model.layers.{layer} in Hugging Face.
ATTENTION: Mapping = {
    "input_layernorm.weight": Replicated("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": QKV(
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
    ),
    "self_attention.linear_proj.weight": RowParallel("self_attn.o_proj.weight"),
    "pre_mlp_layernorm.weight": Replicated("post_attention_layernorm.weight"),
}
QKV_BIAS: Mapping = {
    "self_attention.linear_qkv.bias": QKV(
        "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
    )
}
QK_NORM: Mapping = {
    "self_attention.q_layernorm.weight": Replicated("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": Replicated("self_attn.k_norm.weight"),
}
GATED_MLP: Mapping = {
    "mlp.linear_fc1.weight": GatedColumnParallel("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": RowParallel("mlp.down_proj.weight"),
}
EXPERTS: Mapping = {
    "mlp.router.weight": Replicated("mlp.gate.weight"),
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": GatedColumnParallel(
        "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": RowParallel(
        "mlp.experts.{expert}.down_proj.weight"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model type for the trainer."""

    layer: Mapping  # the parameters of one layer
    # The fields of Megatron's TransformerConfig that not every architecture sets.
    fields: Callable[[PretrainedConfig], dict[str, Any]] = lambda hf: {}
    # Raises ValueError for a configuration that would be computed wrongly.
    check: Callable[[PretrainedConfig], None] = lambda hf: None


def _check_qwen3_moe(hf: PretrainedConfig) -> None:
    """Raise ValueError for a model that SGLang would compute differently or that cannot train.

    SGLang puts experts in every layer and gives the model its own output layer, whatever the
    configuration says.
    """
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


def _qwen3_moe(hf: PretrainedConfig) -> dict[str, Any]:
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


ARCHITECTURES = {
    # Qwen2 and Qwen2.5: biases on queries, keys and values.
    "qwen2": Architecture(
        layer=ATTENTION | QKV_BIAS | GATED_MLP, fields=lambda hf: {"add_qkv_bias": True}
    ),
    # Dense: RMSNorm over the queries and keys of each head.
    "qwen3": Architecture(
        layer=ATTENTION | QK_NORM | GATED_MLP, fields=lambda hf: {"qk_layernorm": True}
    ),
    # A token goes to the experts with the largest router probabilities, in every layer.
    "qwen3_moe": Architecture(
        layer=ATTENTION | QK_NORM | EXPERTS, fields=_qwen3_moe, check=_check_qwen3_moe
    ),
    # Llama 2 and 3. Llama 3.1 stretches low rotary frequencies.
    "llama": Architecture(layer=ATTENTION | GATED_MLP),
    # Dense. An active sliding window (7B v0.1) is refused.
    "mistral": Architecture(layer=ATTENTION | GATED_MLP),
}
