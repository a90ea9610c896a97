"""Causal self-attention over packed sequences, with rotary embedding, as Megatron's core attention.

`PackedSequences` is built once per microbatch and carries what every layer needs. Attention is
computed in one of three ways:

* In half precision: variable-length attention over the packed tokens, by flash-attn where it is
  installed, else by PyTorch's copy of it, FlashAttention 2.
* By a kernel of the device over the packed tokens, where it has one that fits (kernels.py).
* Otherwise: `PaddedBlocks` lays the sequences out in a few blocks [n, heads, length, dim].
  Padding stands to the right of each sequence, so causality hides it from every real token and no
  mask is needed. The output and the gradient of padding are dropped.

Under context parallelism the segments of this rank see keys of all ranks (see packing.py),
and blocks need a mask, because a segment may begin in the middle of its sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from areal_lite.megatron.kernels import kernels
from areal_lite.megatron.packing import LocalTokens, to_device

try:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
except ImportError:
    flash_attn_varlen_func = None

# A sequence joins a block if it fills at least this share of the block's length.
MIN_FILL = 0.85


@dataclass(kw_only=True)
class PaddedBlocks:
    """Segments laid out in padded blocks; a slot is one entry of a block.

    Segments stand in the order of their number of keys, most first. One with less than `MIN_FILL`
    of the keys of its block's first segment opens a new block. Padding repeats the segment's last
    token, so that it holds finite numbers.
    """

    shapes: list[tuple[int, int, int]]  # (segments, queries, keys) of each block
    token_index: Tensor  # int64 [p], the token in each slot
    slot_index: Tensor  # int64 [l], the slot of each token
    key_index: Tensor  # int64 [q], the key in each slot
    # bool [segments, 1, queries, keys] for each block, true where a query sees a key. Empty where
    # every query sees the keys up to its own.
    masks: list[Tensor]

    @classmethod
    def build(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, masked: bool) -> PaddedBlocks:
        """Lay out segments bounded by `cu_seqlens_q` with the keys bounded by `cu_seqlens_k`.

        Both are int32 [n + 1] in CPU memory, as is the result.
        """
        keys = cu_seqlens_k.diff()
        order = keys.argsort(descending=True, stable=True)
        shapes, token_index, key_index, masks = [], [], [], []
        slot_index = torch.empty(int(cu_seqlens_q[-1]), dtype=torch.int64)
        first, offset = 0, 0
        while first < len(order):
            count = int((keys[order[first:]] >= MIN_FILL * keys[order[first]]).sum())
            members = order[first : first + count]
            tokens, real = _padded_index(cu_seqlens_q, members)
            seen, _ = _padded_index(cu_seqlens_k, members)
            slot_index[tokens[real]] = offset + real.flatten().nonzero()[:, 0]
            shapes.append((count, tokens.shape[1], seen.shape[1]))
            token_index.append(tokens.flatten())
            key_index.append(seen.flatten())
            if masked:
                before = (keys - cu_seqlens_q.diff())[members]
                masks.append(_mask(before, tokens.shape[1], seen.shape[1]))
            first += count
            offset += tokens.numel()
        return cls(
            shapes=shapes,
            token_index=torch.cat(token_index),
            slot_index=slot_index,
            key_index=torch.cat(key_index),
            masks=masks,
        )


def _padded_index(cu_seqlens: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token index of each segment, padded, and which are real: [members, longest]."""
    starts = cu_seqlens[:-1].long()[members, None]
    lengths = cu_seqlens.diff().long()[members, None]
    column = torch.arange(int(lengths.max()))
    return starts + column.minimum(lengths - 1), column < lengths


def _mask(before: Tensor, queries: int, keys: int) -> Tensor:
    """Let query i of a segment see the `before` [n] keys in front of it, and its own i + 1."""
    last = before[:, None, None] + torch.arange(queries)[:, None]
    return (torch.arange(keys) <= last)[:, None]


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, and what this attention needs besides."""

    cos: Tensor  # [l, 1, head_dim], of the angle of each token's position
    sin: Tensor
    # int64, the gathered index of each key, in the order of the blocks where there are blocks. None
    # without context parallelism, where the keys are those of this rank.
    key_index: Tensor | None = None
    blocks: PaddedBlocks | None = None  # None where attention takes the tokens as they are
    bounds: np.ndarray | None = None  # int64 [n + 1], of the sequences, for the kernel; else None

    @classmethod
    def build(cls, local: LocalTokens, inv_freq: Tensor, dtype: torch.dtype) -> PackedSequences:
        """Describe `local`, in CPU memory, on the device of `inv_freq`, float32 [head_dim / 2].

        dtype: of the activations.
        """
        device = inv_freq.device
        angles = local.position_ids[:, None].to(device).float() * inv_freq
        angles = torch.cat((angles, angles), -1)[:, None]
        rotation = torch.float32 if kernels.exact_rotation else dtype
        cu_seqlens_q = local.cu_seqlens
        cu_seqlens_k = cu_seqlens_q if local.cu_seqlens_k is None else local.cu_seqlens_k
        key_index, blocks, bounds = local.key_index, None, None
        longest = int(cu_seqlens_q.diff().max())
        kernel, head_dim = kernels.packed_attention, 2 * len(inv_freq)
        if kernel and key_index is None and kernel.fits(inv_freq, dtype, head_dim, longest):
            bounds = cu_seqlens_q.long().numpy()
        elif not kernels.varlen or dtype == torch.float32:
            blocks = PaddedBlocks.build(cu_seqlens_q, cu_seqlens_k, masked=key_index is not None)
            if key_index is not None:
                key_index = key_index[blocks.key_index]
            blocks = to_device(blocks, device)
            blocks.masks = [mask.to(device) for mask in blocks.masks]
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens_q.to(device),
            cu_seqlens_kv=cu_seqlens_k.to(device),
            max_seqlen_q=longest,
            max_seqlen_kv=int(cu_seqlens_k.diff().max()),
            cos=angles.cos().to(rotation),
            sin=angles.sin().to(rotation),
            key_index=None if key_index is None else key_index.to(device),
            blocks=blocks,
            bounds=bounds,
        )


class _TokensToSlots(torch.autograd.Function):
    """Gather x[token_index], the content of every slot. Padding gets no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, token_index: Tensor, slot_index: Tensor) -> Tensor:
        ctx.save_for_backward(slot_index)
        return x.index_select(0, token_index)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _SlotsToTokens(torch.autograd.Function):
    """Gather y[slot_index], the inverse. Padding is dropped and gets the gradient zero."""

    @staticmethod
    def forward(ctx, y: Tensor, slot_index: Tensor) -> Tensor:
        ctx.save_for_backward(slot_index)
        ctx.shape = y.shape
        return y.index_select(0, slot_index)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], grad), None


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence.

    query [t, heads, dim], key and value [t, groups, dim] -> [t, heads * dim].
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        packed = packed_seq_params
        assert packed is not None
        query = kernels.rotate(query, packed.cos, packed.sin)
        key = kernels.rotate(key, packed.cos, packed.sin)
        if packed.key_index is not None:
            group = parallel_state.get_context_parallel_group()
            gathered = gather_from_sequence_parallel_region(
                torch.cat((key, value), -1), group=group
            )
            key, value = gathered.index_select(0, packed.key_index).chunk(2, -1)
        blocks = packed.blocks
        if packed.bounds is not None:
            assert kernels.packed_attention is not None
            return kernels.packed_attention(query, key, value, packed.bounds).flatten(1)
        if blocks is None:
            return _varlen(query, key, value, packed).flatten(1)
        query = _TokensToSlots.apply(query, blocks.token_index, blocks.slot_index)
        if packed.key_index is None:
            key = _TokensToSlots.apply(key, blocks.token_index, blocks.slot_index)
            value = _TokensToSlots.apply(value, blocks.token_index, blocks.slot_index)
        return _SlotsToTokens.apply(_in_blocks(query, key, value, blocks), blocks.slot_index)


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: PaddedBlocks) -> Tensor:
    """Attend block by block: [p, heads * dim], for all slots."""
    outputs, start, key_start = [], 0, 0
    for i, (count, queries, keys) in enumerate(blocks.shapes):
        end, key_end = start + count * queries, key_start + count * keys
        q = query[start:end].unflatten(0, (count, queries)).transpose(1, 2)
        k = key[key_start:key_end].unflatten(0, (count, keys)).transpose(1, 2)
        v = value[key_start:key_end].unflatten(0, (count, keys)).transpose(1, 2)
        mask = blocks.masks[i] if blocks.masks else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        start, key_start = end, key_end
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """Attend over packed tokens: [l, heads, dim].

    Where a segment has more keys than queries, its last query sees all of them.
    """
    bounds = (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv)
    tensors = (query, key.contiguous(), value.contiguous())
    if flash_attn_varlen_func is not None:
        return flash_attn_varlen_func(*tensors, *bounds, causal=True)
    return causal_varlen(*tensors, *bounds)


def causal_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
) -> Tensor:
    """Attend as `_varlen` does, with PyTorch's kernel."""
    # Before 2.12, torch gave keys with fewer heads to the kernel without being told.
    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    out = varlen_attn(query, key, value, bounds_q, bounds_k, longest_q, longest_k, **options)
    assert isinstance(out, Tensor)
    return out
