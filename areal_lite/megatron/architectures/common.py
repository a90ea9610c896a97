"""Building blocks of an architecture: tables `Megatron parameter -> Hugging Face tensors`."""

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
    """The description of one model type for the trainer.

    layer: the parameters of one layer.
    fields: the fields of Megatron's TransformerConfig that not every architecture sets.
    check: raises ValueError for a configuration that would be computed wrongly.
    """

    model_type: str
    layer: Mapping
    fields: Callable[[PretrainedConfig], dict[str, Any]] = lambda hf: {}
    check: Callable[[PretrainedConfig], None] = lambda hf: None
