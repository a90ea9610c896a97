"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from areal_lite.megatron.architectures.common import ATTENTION, GATED_MLP, QKV_BIAS, Architecture

QWEN2 = Architecture("qwen2", ATTENTION | QKV_BIAS | GATED_MLP, lambda hf: {"add_qkv_bias": True})
