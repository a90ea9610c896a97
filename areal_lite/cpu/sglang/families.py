"""Families of models without a GPU: SGLang's models, with what it lets them do with a GPU only.

Qwen3-Next and Qwen3.5 get one kernel for gated delta nets. SGLang keeps the pools of states and
says which request has which. Its kernels for them are in Triton, or in a build of its own for one
kind of processor.

Prefixes are not cached: a cached prefix would need its states, too, which SGLang keeps on a GPU
only, or for pages of one token.

gpt-oss gets this package's attention, which knows sinks, and one cache for all of its layers: that
for windows has kernels in Triton only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_lite.cpu.kernels import delta_net
from areal_lite.data.model_folder import DELTA_NETS

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_adjusting = False
# Requests that run at a time, unless a setting says otherwise. SGLang would fill the memory.
_STATES = 128
_CONFIGURE = "arg_groups.model_hook.handle_mamba_radix_cache"
_WRAP = "model_executor.model_runner_components.attention_backend_setup.attn_backend_wrapper"


def hooks() -> tuple[tuple[str, Callable[..., Any]], ...]:
    """Return what takes the place of which functions of SGLang, around them."""
    return (
        (_CONFIGURE, _configure),
        (_WRAP, _with_states),
        ("models.qwen3_next.Qwen3GatedDeltaNet.forward", _forward),
        ("models.qwen3_5.Qwen3_5GatedDeltaNet.forward", _forward),
        ("models.qwen3_5.fused_sigmoid_mul", _gated),
        ("models.qwen2_moe.fused_gate_sigmoid_mul_add", _add_shared_expert),
        ("arg_groups.model_hook.handle_model_specific_adjustments", _adjust),
        ("arg_groups.model_hook.attention_backends_of", _allowed_backends),
        ("models.gpt_oss.GptOssAttention.__init__", _make_attention),
        ("layers.rotary_embedding.factory.get_rope_wrapper", _rotation),
    )


def _configure(original: Callable[..., None], server_args: Any, hf_config: Any) -> None:
    """Switch the prefix cache off for models with states, and limit their number."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if hf_config.model_type == "gpt_oss":
        declare_resolution(server_args, __name__, disable_hybrid_swa_memory=True)
    if hf_config.model_type in DELTA_NETS:
        given = resolving_view(server_args)
        states = given.max_mamba_cache_size or given.max_running_requests or _STATES
        limits = {"disable_radix_cache": True, "max_mamba_cache_size": states}
        declare_resolution(server_args, __name__, **limits)
    original(server_args, hf_config)


def _with_states(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """Return the attention backend of a model, with one for its states if it has any."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    config = hybrid_gdn_config(runner.model_config)
    if config is None:
        return original(runner, full_attn_backend)
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
        HybridLinearAttnBackend,
        MambaAttnBackendBase,
    )

    return HybridLinearAttnBackend(
        full_attn_backend, MambaAttnBackendBase(runner), config.full_attention_layer_ids
    )


def _forward(
    original: Callable[..., Tensor], self: Any, hidden_states: Tensor, forward_batch: ForwardBatch
) -> Tensor:
    """Compute a layer for the tokens of a batch: [tokens, hidden] -> the same."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    hybrid: Any = get_attn_backend()
    backend = hybrid.linear_attn_backend
    q, k, v, gate, b, a = self.fix_query_key_value_ordering(
        self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
    )
    x = torch.cat([part.flatten(1) for part in (q, k, v)], 1).float()
    rate = F.softplus(a.float() + self.dt_bias.float())
    decay = (-self.A_log.float().exp() * rate).exp()
    described = backend.forward_metadata
    cache = backend.req_to_token_pool.mamba2_layer_cache(self.layer_id)
    slots = described.mamba_cache_indices.long()
    before, states = (pool[slots].float().contiguous() for pool in (cache.conv[0], cache.temporal))
    if forward_batch.extend_prefix_lens is not None and forward_batch.forward_mode.is_extend():
        fresh = forward_batch.extend_prefix_lens == 0
        before[fresh], states[fresh] = 0, 0
    out = torch.empty(len(x), self.num_v_heads, self.head_v_dim)
    delta_net.advance(
        x.numpy(),
        described.query_start_loc.numpy().astype(np.int64),
        self.conv1d.weight.squeeze(1).float().numpy(),
        decay.contiguous().numpy(),
        b.float().sigmoid().contiguous().numpy(),
        before.numpy(),
        states.numpy(),
        out.numpy(),
    )
    cache.conv[0][slots] = before.to(cache.conv[0].dtype)
    cache.temporal[slots] = states.to(cache.temporal.dtype)
    scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + self.layer_norm_epsilon)
    out = out * scale * self.norm.weight.float() * F.silu(gate.reshape(out.shape).float())
    return self.out_proj(out.to(hidden_states.dtype).flatten(1))[0]


def _gated(original: Callable[..., Tensor], attn_output: Tensor, gate: Tensor, **_: Any):
    return attn_output * gate.reshape(attn_output.shape).sigmoid()


def _add_shared_expert(
    original: Callable[..., None],
    hidden_states: Tensor,
    gate_weight: Tensor,
    shared_output: Tensor,
    final_hidden_states: Tensor,
) -> None:
    final_hidden_states += F.linear(hidden_states, gate_weight[None]).sigmoid() * shared_output


def _adjust(original: Callable[..., None], server_args: Any) -> None:
    """Adjust settings to the model, for which SGLang asks for a backend that it knows."""
    global _adjusting
    _adjusting = True
    original(server_args)
    _adjusting = False


def _allowed_backends(original: Callable[..., tuple[str, ...]], cfg: Any) -> tuple[str, ...]:
    """Name a backend with which SGLang allows the model, in place of ours."""
    found = original(cfg)
    return ("triton", "triton") if _adjusting else found


def _make_attention(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Give the sinks the type of the model; SGLang's are bfloat16 always."""
    original(self, *args, **named)
    sinks = self.sinks.to(self.qkv_proj.weight.dtype)
    self.sinks = nn.Parameter(sinks, requires_grad=False)


def _rotation(original: Callable[..., Any], *args: Any, device: Any = None, **named: Any) -> Any:
    """Make the rotation of DeepSeek-V3, for which SGLang takes YaRN alone on a CPU.

    All tokens, new ones too, then attend to the short vectors in the cache.
    """
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
    return get_rope(*args, **named)
