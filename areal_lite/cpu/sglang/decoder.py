"""The layers of a dense decoder by few large operators, in place of SGLang's many small ones.

A decode step of a small model is made of operators that take microseconds each. SGLang makes about
forty of them for a layer, and their calls take more time than their arithmetic. Here a layer is
four matrix products and five kernels:

    add and norm -> product -> norm, rotate, write to the cache -> attention -> product
    add and norm -> product -> SwiGLU -> product

The cache holds whole pages of a prompt. All samples of a group have the rest of it to compute: that
is done for one of them, and the others get copies of its keys and values (`find_alike`).

This takes the place of `forward` of SGLang's Llama (also Mistral), Qwen2 and Qwen3 models, in
float32 and on one rank. Everything else goes to SGLang's own code: bfloat16, tensor parallelism,
`server.deterministic`, mixtures of experts, sliding windows, SGLang's adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_exec, get_parallel
from torch import Tensor, nn

from areal_lite.cpu.kernels import norms
from areal_lite.cpu.kernels.paged_attention import copy_tokens, find_alike, place_heads
from areal_lite.cpu.kernels.products import PackedWeights
from areal_lite.cpu.sglang.attention import PagedCpuAttention, is_plain_attention
from areal_lite.cpu.sglang.operators import is_plain_rotation

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

log = logging.getLogger(__name__)

# oneDNN compiles a kernel for each number of rows, in up to half a millisecond.
_MOST_EXACT_ROWS = 16
packed = PackedWeights()
"""Copies of the model's weights; `forget_packed` clears them when the weights change."""
_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def padded(rows: int) -> int:
    """Return the number of rows to compute: up to an eighth more, so that few numbers occur."""
    if rows <= _MOST_EXACT_ROWS:
        return rows
    step = max(_MOST_EXACT_ROWS, 2 ** (rows.bit_length() - 1) // 8)
    return -(-rows // step) * step


def forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    forward_batch: ForwardBatch,
    input_embeds: Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    """Return the hidden states of the tokens, float32 [tokens, hidden], normed."""
    backend = get_attn_backend()
    if (
        not _is_known(model)
        or input_embeds is not None
        or not isinstance(backend, PagedCpuAttention)
        or backend.token_to_kv_pool.dtype != torch.float32
        or forward_batch.forward_mode.is_idle()
        or not backend.is_plain(model.layers[0].self_attn.attn, forward_batch)
    ):
        return original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    return _run(model, model.embed_tokens(input_ids), positions, forward_batch, backend)


def lm_head(
    original: Callable[..., Tensor],
    processor: Any,
    hidden: Tensor,
    head: Any,
    embedding_bias: Tensor | None = None,
    **out: Tensor | None,
) -> Tensor:
    """Return the logits of hidden states, float32 [tokens, vocabulary]."""
    weight = getattr(head, "weight", None)
    if (
        get_exec().deterministic.enable_deterministic_inference
        or embedding_bias is not None
        or any(buffer is not None for buffer in out.values())
        or hidden.dtype != torch.float32
        or not isinstance(weight, Tensor)
        or weight.dtype != torch.float32
    ):
        return original(processor, hidden, head, embedding_bias, **out)
    return packed.linear(hidden, weight)


def forget_packed(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Let SGLang change weights, whose packed copies are then wrong."""
    try:
        return original(*args, **named)
    finally:
        packed.clear()


def _run(
    model: Any, embedded: Tensor, positions: Tensor, batch: ForwardBatch, backend: PagedCpuAttention
) -> Tensor:
    """Run all layers on `embedded`, [tokens, hidden]."""
    slots = places = batch.out_cache_loc.numpy()
    if (alike := find_alike(batch, backend.slots)) is not None:
        embedded, positions = embedded[alike.rows], positions[alike.rows]
        slots = places[alike.rows]
        backend.keep_rows(alike.rows)
    tokens, hidden = embedded.shape
    attention = model.layers[0].self_attn
    heads, dim = attention.num_heads, attention.head_dim
    rows = padded(tokens)
    # Rows after the tokens stay zero.
    normed, attended = torch.zeros(rows, hidden), torch.zeros(rows, heads, dim)
    query = np.empty((tokens, heads, dim), np.float32)
    angles = attention.rotary_emb.cos_sin_cache.index_select(0, positions).numpy()
    stream = np.zeros((tokens, hidden), np.float32)
    added = embedded
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        keys, values = backend.cache(attention.attn)
        _add_and_norm(stream, added, layer.input_layernorm, normed)
        projections = packed.linear(normed, attention.qkv_proj.weight, attention.qkv_proj.bias)
        place_heads(
            projections.numpy(), *_head_norms(attention), angles, slots, query, keys, values
        )
        if alike is not None:
            copy_tokens(keys, values, places[alike.source], places[alike.others])
        backend.attend(query, keys, values, attention.scaling, attended.numpy())
        added = packed.linear(
            attended.view(rows, heads * dim), attention.o_proj.weight, attention.o_proj.bias
        )
        _add_and_norm(stream, added, layer.post_attention_layernorm, normed)
        gates, ups = packed.linear(normed, mlp.gate_up_proj.weight).chunk(2, dim=-1)
        added = packed.linear(F.silu(gates).mul_(ups), mlp.down_proj.weight)
    _add_and_norm(stream, added, model.norm, normed)
    return normed[:tokens] if alike is None else normed[alike.place]


def _add_and_norm(stream: np.ndarray, added: Tensor, norm: RMSNorm, normed: Tensor) -> None:
    eps = np.float32(norm.variance_epsilon)
    norms.add_and_norm(stream, added.numpy(), norm.weight.detach().numpy(), eps, normed.numpy())


def _head_norms(attention: Any) -> tuple[np.ndarray, np.float32]:
    """Return the weights of the norms of queries and keys, [2, dim] or [0, dim], and their eps."""
    if not hasattr(attention, "q_norm"):
        return np.empty((0, attention.head_dim), np.float32), np.float32(0)
    weights = [norm.weight.detach().numpy() for norm in (attention.q_norm, attention.k_norm)]
    return np.stack(weights), np.float32(attention.q_norm.variance_epsilon)


def _is_known(model: Any) -> bool:
    """Return whether `_run` computes what this model does. The first answer is logged."""
    if model not in _known:
        _known[model] = _is_plain(model)
        whose = "areal_lite's fused layers" if _known[model] else "SGLang's own layers"
        log.info("%s runs with %s", type(model).__name__, whose)
    return _known[model]


def _is_plain(model: Any) -> bool:
    return (
        get_parallel().tp_size == 1
        and model.pp_group.world_size == 1
        and not get_exec().deterministic.enable_deterministic_inference
        and not model.layers_to_capture
        and _is_plain_norm(model.norm)
        and all(map(_is_plain_layer, model.layers))
    )


def _is_plain_layer(layer: Any) -> bool:
    attention, mlp, rotary = layer.self_attn, layer.mlp, layer.self_attn.rotary_emb
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    methods = {type(getattr(product, "quant_method", None)) for product in products}
    names = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    of_heads = (getattr(attention, name) for name in names)
    return (
        methods == {UnquantizedLinearMethod}
        and all(p.weight.dtype == torch.float32 for p in products)
        and mlp.gate_up_proj.bias is None
        and mlp.down_proj.bias is None
        and type(mlp.act_fn) is SiluAndMul
        and _is_plain_norm(layer.input_layernorm)
        and _is_plain_norm(layer.post_attention_layernorm)
        and all(map(_is_plain_norm, of_heads))
        and is_plain_rotation(rotary)
        and rotary.head_size == attention.head_dim
        and is_plain_attention(attention.attn)
        and attention.attn.sliding_window_size in (None, -1)
    )


def _is_plain_norm(norm: Any) -> bool:
    return (
        type(norm) is RMSNorm
        and norm.weight.dtype == torch.float32
        and norm.variance_size_override is None
    )
