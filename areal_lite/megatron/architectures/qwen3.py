"""Qwen3, dense: RMSNorm over the queries and keys of each head."""

from areal_lite.megatron.architectures.common import ATTENTION, GATED_MLP, QK_NORM, Architecture

QWEN3 = Architecture(
    model_type="qwen3",
    layer=ATTENTION | QK_NORM | GATED_MLP,
    fields=lambda hf: {"qk_layernorm": True},
)
