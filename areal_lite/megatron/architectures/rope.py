"""Rotary frequencies (Su et al., 2021, arXiv:2104.09864), and their stretching in Llama 3.1."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.megatron.architectures.parameters import head_dim


def check_rope(hf: PretrainedConfig) -> None:
    """Raise ValueError for a rotary embedding that would be computed wrongly."""
    rope = hf.rope_parameters
    if (
        rope.get("rope_type", "default") not in ("default", "llama3")
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        raise ValueError(
            f"rope_parameters {rope} are not supported by the trainer: use rope_type default or llama3, over whole heads"
        )


def inverse_frequencies(hf: PretrainedConfig, device: torch.device) -> Tensor:
    """float32 [head_dim / 2]: theta^(-2i / head_dim), radians per position."""
    dim, rope = head_dim(hf), hf.rope_parameters
    plain = 1.0 / rope["rope_theta"] ** (
        torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    )
    return _llama3(plain, rope) if rope.get("rope_type") == "llama3" else plain


def _llama3(plain: Tensor, rope: dict) -> Tensor:
    """Frequencies that turn less than `low` times in the context of pre-training are divided by `factor`, those that turn more than `high`
    times stay, and between them the two are mixed in proportion to the number of turns."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / plain)
    stay = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - stay) * plain / rope["factor"] + stay * plain
