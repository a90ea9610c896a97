"""Causal self-attention over packed sequences, with rotary embedding, as Megatron's core attention.

`PackedSequences` is made once per microbatch and carries what every layer needs: cosines and sines of each token's position, and how to lay
the sequences out in a few padded blocks [n, heads, length, dim] of similar length. Causality makes a mask needless there: padding stands to
the right of each sequence, so no real token sees it, and the output and the gradient of padding are dropped. Under context parallelism the
segments of this rank see keys of all ranks (see context.py), and where a segment begins in its sequence takes a mask to say. On a GPU, in
half precision, packed sequences are attended to as they are: by flash-attn where it is installed, else by PyTorch's own copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from areal_lite.megatron.context_parallel import LocalTokens

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

# A sequence joins a block if it fills at least this share of the block's length.
MIN_FILL = 0.85


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, plus what this attention needs.

    cos, sin [l, 1, head_dim] · blocks: (sequences, queries, keys) of each padded block, none where sequences are taken as they are ·
    rows int64 [p]: the token in each place of the blocks, in order · places int64 [l]: the place of each token ·
    key_rows int64 [k]: the key in each place, among those of all ranks; None without context parallelism, where it is `rows` ·
    masks: bool [sequences, 1, queries, keys] of each block, which keys a query sees; empty where all before it and itself.
    """

    cos: Tensor = None
    sin: Tensor = None
    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    rows: Tensor = None
    places: Tensor = None
    key_rows: Tensor = None
    masks: list[Tensor] = field(default_factory=list)

    @classmethod
    def build(cls, local: LocalTokens, inv_freq: Tensor, dtype: torch.dtype) -> PackedSequences:
        """`local` is in CPU memory, the result where `inv_freq` is, float32 [head_dim / 2]: angles in float32, then rounded to `dtype`."""
        device = inv_freq.device
        angles = local.position_ids[:, None].to(device).float() * inv_freq
        angles = torch.cat((angles, angles), -1)[:, None]
        cu_seqlens_q = local.cu_seqlens
        cu_seqlens_k = cu_seqlens_q if local.cu_seqlens_k is None else local.cu_seqlens_k
        packed = cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens_q.to(device),
            cu_seqlens_kv=cu_seqlens_k.to(device),
            max_seqlen_q=int(cu_seqlens_q.diff().max()),
            max_seqlen_kv=int(cu_seqlens_k.diff().max()),
            cos=angles.cos().to(dtype),
            sin=angles.sin().to(dtype),
            key_rows=local.key_rows,
        )
        if device.type != "cuda" or dtype == torch.float32:
            packed.blocks, packed.rows, packed.places, in_blocks = block_layout(
                cu_seqlens_q, cu_seqlens_k
            )
            if local.key_rows is not None:
                packed.key_rows = local.key_rows[in_blocks]
                packed.masks = [
                    mask.to(device)
                    for mask in block_masks(packed.blocks, cu_seqlens_q, cu_seqlens_k)
                ]
            packed.rows, packed.places = packed.rows.to(device), packed.places.to(device)
        if packed.key_rows is not None:
            packed.key_rows = packed.key_rows.to(device)
        return packed


def block_layout(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> tuple[list[tuple[int, int, int]], Tensor, Tensor, Tensor]:
    """(blocks, rows, places) of `PackedSequences`, and the key in each place of the blocks, for segments bounded by `cu_seqlens_q` [n + 1]
    that see the keys bounded by `cu_seqlens_k` [n + 1].

    Segments are taken in `_order`; one with less than `MIN_FILL` of the keys of the block's first opens a new block. A padded place
    repeats the segment's last token, so that it holds something finite.
    """
    keys, order = cu_seqlens_k.diff(), _order(cu_seqlens_k)
    blocks, rows, key_rows = [], [], []
    places = torch.empty(int(cu_seqlens_q[-1]), dtype=torch.int64)
    first, offset = 0, 0
    while first < len(order):
        count = int((keys[order[first:]] >= MIN_FILL * keys[order[first]]).sum())
        members = order[first : first + count]
        row, real = _padded_rows(cu_seqlens_q, members)
        key_row, _ = _padded_rows(cu_seqlens_k, members)
        places[row[real]] = offset + real.flatten().nonzero()[:, 0]
        blocks.append((count, row.shape[1], key_row.shape[1]))
        rows.append(row.flatten())
        key_rows.append(key_row.flatten())
        first, offset = first + count, offset + row.numel()
    return blocks, torch.cat(rows), places, torch.cat(key_rows)


def block_masks(
    blocks: list[tuple[int, int, int]], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> list[Tensor]:
    """`PackedSequences.masks`: the last query of a segment sees all its keys, each query before it one less."""
    before = (cu_seqlens_k.diff() - cu_seqlens_q.diff())[_order(cu_seqlens_k)]
    parts = before.split([count for count, _, _ in blocks])
    return [
        (torch.arange(keys) <= part[:, None, None] + torch.arange(queries)[:, None])[:, None]
        for part, (_, queries, keys) in zip(parts, blocks)
    ]


def _order(cu_seqlens_k: Tensor) -> Tensor:
    """Segments with the most keys first."""
    return cu_seqlens_k.diff().argsort(descending=True, stable=True)


def _padded_rows(cu_seqlens: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """int64 and bool [members, longest]: the rows of each segment, and which are real."""
    starts, lengths = cu_seqlens[:-1].long()[members, None], cu_seqlens.diff().long()[members, None]
    column = torch.arange(int(lengths.max()))
    return starts + column.minimum(lengths - 1), column < lengths


class _Take(torch.autograd.Function):
    """x[rows], where `places` undoes `rows`: one gather in each direction. Repeated rows are padding and have no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Return(torch.autograd.Function):
    """y[places], the inverse of `_Take`: padding is dropped and gets gradient zero."""

    @staticmethod
    def forward(ctx, y: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = y.shape
        return y.index_select(0, places)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.saved_tensors[0], grad), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [t, heads, dim], the two halves of dim being the two coordinates (Su et al., 2021, arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class PackedAttention(MegatronModule):
    """Causal attention of query [t, heads, dim], key and value [t, groups, dim] -> [t, heads * dim], within each packed sequence."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
        super().__init__(config=config)

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSequences = None,
    ) -> Tensor:
        packed = packed_seq_params
        query, key = rotate(query, packed.cos, packed.sin), rotate(key, packed.cos, packed.sin)
        if packed.key_rows is not None:
            group = parallel_state.get_context_parallel_group()
            seen = gather_from_sequence_parallel_region(
                torch.cat((key, value), -1), group=group
            ).index_select(0, packed.key_rows)
            key, value = seen.chunk(2, -1)
        if not packed.blocks:
            return _varlen(query, key, value, packed).flatten(1)
        query = _Take.apply(query, packed.rows, packed.places)
        if packed.key_rows is None:
            key, value = (_Take.apply(x, packed.rows, packed.places) for x in (key, value))
        return _Return.apply(_in_blocks(query, key, value, packed), packed.places)


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """[p, heads * dim], for all places of the blocks."""
    outputs, start, key_start = [], 0, 0
    for i, (count, queries, keys) in enumerate(packed.blocks):
        span, key_span = (
            slice(start, start + count * queries),
            slice(key_start, key_start + count * keys),
        )
        q = query[span].unflatten(0, (count, queries)).transpose(1, 2)
        k, v = (x[key_span].unflatten(0, (count, keys)).transpose(1, 2) for x in (key, value))
        mask = packed.masks[i] if packed.masks else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        start, key_start = span.stop, key_span.stop
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
    """[l, heads, dim]; where a segment has more keys than queries, its last query sees all of them."""
    bounds = (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv)
    if flash_attn_varlen_func is not None:
        return flash_attn_varlen_func(
            query, key.contiguous(), value.contiguous(), *bounds, causal=True
        )
    grouped = query.shape[1] != key.shape[1]
    return varlen_attn(
        query,
        key.contiguous(),
        value.contiguous(),
        *bounds,
        window_size=(-1, 0),
        enable_gqa=grouped,
    )
