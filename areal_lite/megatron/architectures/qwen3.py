"""Qwen3, dense: RMSNorm over each head's queries and keys."""

from areal_lite.megatron.architectures.common import ATTENTION, GATED_MLP, QK_NORM, Architecture

QWEN3 = Architecture("qwen3", ATTENTION | QK_NORM | GATED_MLP, lambda hf: {"qk_layernorm": True})
