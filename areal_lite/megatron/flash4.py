"""FlashAttention 4 in place of PyTorch's FlashAttention 2, on request and after a check.

It is faster on Hopper and Blackwell GPUs, but still a beta, and so is PyTorch's use of it. With
AREAL_LITE_FLASH_ATTENTION=4 in the environment, a rank compares it with plain attention in float32,
on a small example of the model's own shapes. It uses it only if output and gradients agree.
"""

import logging
import os
from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

log = logging.getLogger(__name__)

ENV = "AREAL_LITE_FLASH_ATTENTION"
# Relative errors of bfloat16 attention are about 0.005.
_TOLERANCE = 0.02
_LENGTHS = (1, 7, 130, 300)

# (query [t, heads, dim], key, value [t, groups, dim], bounds of the sequences int32 [n + 1],
# length of the longest) -> [t, heads, dim]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@cache
def use_flash4(device: torch.device, heads: int, groups: int, dim: int) -> bool:
    """Switch PyTorch to FlashAttention 4 if it is asked for and right; return whether it is.

    The shapes are those of one rank's queries, keys and heads.
    """
    if os.environ.get(ENV) != "4":
        return False
    return activate_if_right(
        partial(attention.activate_flash_attention_impl, "FA4"),
        attention.restore_flash_attention_impl,
        partial(_worst_error, _attend, device, heads, groups, dim),
    )


def activate_if_right(
    activate: Callable[[], object], restore: Callable[[], object], error: Callable[[], float]
) -> bool:
    """Activate a kernel, and restore the previous one if it fails or its error is too large."""
    try:
        activate()
        worst = error()
    except Exception as failure:  # it is an option: whatever it lacks, training goes on without it
        reason = f"{type(failure).__name__}: {failure}"
    else:
        if worst < _TOLERANCE:
            log.info("FlashAttention 4 is used: relative error %.4f", worst)
            return True
        reason = f"relative error {worst:.4f}, must be below {_TOLERANCE}"
    restore()
    log.warning("FlashAttention 4 is not used (%s): unset %s", reason, ENV)
    return False


def causal_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
) -> Tensor:
    """Attend over packed tokens with PyTorch's kernel: [t, heads, dim].

    Where a sequence has more keys than queries, its last query sees all of them.
    """
    packed = (query, key, value, bounds_q, bounds_k, longest_q, longest_k)
    # Before 2.12, torch gave keys with fewer heads to the kernel without being told.
    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    out = varlen_attn(*packed, **options)
    assert isinstance(out, Tensor)
    return out


def _attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
    return causal_varlen(query, key, value, bounds, bounds, longest, longest)


@torch.enable_grad()
def _worst_error(attend: Attend, device: torch.device, heads: int, groups: int, dim: int) -> float:
    """Return the largest relative error of the output and of the three gradients."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(sum(_LENGTHS), n, dim, generator=generator).bfloat16().to(device)
        for n in (heads, groups, groups, heads)
    ]
    inputs, grad = [x.requires_grad_() for x in tensors[:3]], tensors[3]
    exact_inputs = [x.detach().float().requires_grad_() for x in inputs]
    bounds = torch.tensor((0, *_LENGTHS), device=device).cumsum(0).int()
    out = attend(inputs[0], inputs[1], inputs[2], bounds, max(_LENGTHS))
    exact = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in sequence), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for sequence in zip(*(x.split(_LENGTHS) for x in exact_inputs), strict=True)
        ]
    )
    got = (out, *torch.autograd.grad(out, inputs, grad))
    want = (exact, *torch.autograd.grad(exact, exact_inputs, grad.float()))
    errors = [(a.float() - b).norm() / b.norm() for a, b in zip(got, want, strict=True)]
    return torch.stack(errors).max().item()
