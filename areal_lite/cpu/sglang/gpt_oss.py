"""gpt-oss without a GPU: SGLang's model with this package's attention, which knows sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_adjusting = False


def hooks() -> tuple[tuple[str, Callable[..., Any]], ...]:
    """Return what takes the place of which functions of SGLang, around them."""
    return (
        ("arg_groups.model_hook.handle_mamba_radix_cache", _configure),
        ("arg_groups.model_hook.handle_model_specific_adjustments", _adjust),
        ("arg_groups.model_hook.attention_backends_of", _allowed_backends),
        ("models.gpt_oss.GptOssAttention.__init__", _make_attention),
        ("layers.moe.fused_moe_native.swiglu_gpt_oss_sigmoid_alpha", _gated),
    )


def _configure(original: Callable[..., None], arguments: Any, hf_config: Any) -> None:
    """Keep one cache for all layers: that for windows has kernels in Triton only."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    if hf_config.model_type == "gpt_oss":
        declare_resolution(arguments, __name__, disable_hybrid_swa_memory=True)
    original(arguments, hf_config)


def _adjust(original: Callable[..., None], arguments: Any) -> None:
    """Adjust settings to the model, for which SGLang asks for a backend that it knows."""
    global _adjusting
    _adjusting = True
    original(arguments)
    _adjusting = False


def _allowed_backends(original: Callable[..., tuple[str, ...]], view: Any) -> tuple[str, ...]:
    """Name a backend with which SGLang allows the model, in place of ours."""
    found = original(view)
    return ("triton", "triton") if _adjusting else found


def _make_attention(
    original: Callable[..., None], attention: Any, *args: Any, **named: Any
) -> None:
    """Give the sinks the type of the model; SGLang's are bfloat16 always."""
    original(attention, *args, **named)
    sinks = attention.sinks.to(attention.qkv_proj.weight.dtype)
    attention.sinks = nn.Parameter(sinks, requires_grad=False)


def _gated(original: Callable[..., Tensor], x: Tensor, alpha: float, limit: float) -> Tensor:
    """Compute what SGLang's function does without compiling it, which takes seconds."""
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + 1)
