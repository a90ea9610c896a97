"""SGLang's norm, rotary embedding and sampling, by kernels of areal_lite/cpu/kernels.

SGLang has a registry of operators for hardware that it does not know. Inputs that the kernels do
not suit go to SGLang's own torch code: other types than float32, and variants of the operators that
no supported model has. A kernel has one thread: the batches of a decode step are too small for two.
"""

from collections.abc import Callable

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from torch import Tensor

from areal_lite.cpu.kernels import norms, sampling


def register_operators(platform_key: str) -> None:
    """Use the kernels in this process, on the platform with SGLang's name `platform_key`."""
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, platform_key)
    BaseFusedOp.register_oot_forward(RotaryEmbedding, rotary_embedding, platform_key)


def rms_norm(norm: RMSNorm, x: Tensor, residual: Tensor | None = None, *more, **named):
    """Norm x [..., n], or x + residual: the normed tensor, and with a residual also the sum."""
    plain = (
        not any(argument is not None for argument in (*more, *named.values()))
        and norm.variance_size_override is None
        and norm.override_orig_dtype in (None, torch.float32)
        and x.shape[-1] == norm.hidden_size
    )
    if not (plain and norms.fits(x) and norms.fits(norm.weight)):
        return norm.forward_native(x, residual, *more, **named)
    if residual is not None:
        x = x + residual
    normed, _ = norms.normed(x, norm.weight, norm.variance_epsilon)
    return normed if residual is None else (normed, x)


def rotary_embedding(
    rotary: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor, *more, **named
):
    """Rotate query and key, [tokens, heads · dim] or with a dimension of heads."""
    plain = not any(argument is not None for argument in (*more, *named.values()))
    if not (plain and is_plain_rotation(rotary) and norms.fits(query)):
        return rotary.forward_native(positions, query, key, *more, **named)
    both = rotary.cos_sin_cache.index_select(0, positions.flatten())
    cos, sin = (norms.array(half, *half.shape) for half in both.chunk(2, dim=-1))
    return tuple(norms.rotated(x, cos, sin, rotary.head_size) for x in (query, key))


def is_plain_rotation(rotary: RotaryEmbedding) -> bool:
    """Return whether it rotates whole heads in halves, by the angles of the position alone."""
    return (
        type(rotary).forward_native is RotaryEmbedding.forward_native
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
        and not hasattr(rotary, "sin_cos_cache")
        and norms.fits(rotary.cos_sin_cache)
    )


def draw(
    original: Callable[..., Tensor],
    probs: Tensor,
    sampling_seed: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Draw a token from each row of probs, float32 [rows, vocabulary]: int32 [rows].

    torch.multinomial draws a number for every token of the vocabulary. One for each row will do.
    Raises ValueError for NaN, as it does.
    """
    if sampling_seed is not None:
        return original(probs, sampling_seed, positions)
    uniform = torch.rand(len(probs), dtype=torch.float64).numpy()
    tokens = torch.full((len(probs),), -1, dtype=torch.int32)
    sampling.draw(probs.float().contiguous().numpy(), uniform, tokens.numpy())
    if (tokens < 0).any():
        raise ValueError("probabilities are NaN: the weights, or the logits, are broken")
    return tokens
