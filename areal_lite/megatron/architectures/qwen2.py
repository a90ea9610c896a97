"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from areal_lite.megatron.architectures.common import ATTENTION, GATED_MLP, QKV_BIAS, Architecture

QWEN2 = Architecture(
    model_type="qwen2",
    layer=ATTENTION | QKV_BIAS | GATED_MLP,
    fields=lambda hf: {"add_qkv_bias": True},
)
