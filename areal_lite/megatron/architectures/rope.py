"""Rotary frequencies (Su et al., 2021, arXiv:2104.09864), plain and as Llama 3.1 stretches them."""

import math

import torch
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.megatron.architectures.parameters import head_dim


def check_rope(hf: PretrainedConfig) -> None:
    """Raise ValueError for a rotary embedding that would be computed wrongly."""
    rope = hf.rope_parameters
    known = rope.get("rope_type", "default") in ("default", "llama3")
    if not known or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters {rope} are not supported by the trainer:"
            " use rope_type default or llama3, over whole heads"
        )


def inverse_frequencies(hf: PretrainedConfig, device: torch.device) -> Tensor:
    """Compute theta^(-2i / head_dim), in radians per position: float32 [head_dim / 2]."""
    dim = head_dim(hf)
    rope = hf.rope_parameters
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    plain = 1.0 / rope["rope_theta"] ** exponents
    return _llama3(plain, rope) if rope.get("rope_type") == "llama3" else plain


def _llama3(plain: Tensor, rope: dict) -> Tensor:
    """Divide low frequencies by `factor` and keep high ones.

    A frequency is low when it makes fewer than `low_freq_factor` turns within the context of
    pre-training, and high above `high_freq_factor`. In between the two results are mixed in
    proportion to the number of turns.
    """
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / plain)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * plain / rope["factor"] + keep * plain
