"""Causal self-attention over packed sequences, with rotary embedding, as Megatron's core attention.

`PackedSequences` is made once per microbatch and carries what every layer needs: cosines and sines of each token's position, and how to lay
the sequences out in a few padded blocks [n, heads, length, dim] of similar length. Causality makes a mask needless there: padding stands to
the right of each sequence, so no real token sees it, and the output and the gradient of padding are dropped. On a GPU with flash-attn the
packed sequences are attended to as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MegatronModule
from torch import Tensor

from areal_lite.trainer.packing import MicroBatch

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

# A sequence joins a block if it fills at least this share of the block's length.
MIN_FILL = 0.85


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, plus what this attention needs.

    cos, sin [t, 1, head_dim] · blocks: (sequences, length) of each padded block, none where flash-attn takes the sequences as they are ·
    rows int64 [p]: the token in each place of the blocks, in order · places int64 [t]: the place of each token.
    """

    cos: Tensor = None
    sin: Tensor = None
    blocks: list[tuple[int, int]] = field(default_factory=list)
    rows: Tensor = None
    places: Tensor = None

    @classmethod
    def build(cls, microbatch: MicroBatch, inv_freq: Tensor, dtype: torch.dtype) -> PackedSequences:
        """`inv_freq` float32 [head_dim / 2]: angles are computed in float32, then rounded to `dtype`."""
        angles = microbatch.position_ids[:, None].float() * inv_freq
        angles = torch.cat((angles, angles), -1)[:, None]
        cu_seqlens, device = microbatch.cu_seqlens, microbatch.tokens.device
        varlen = flash_attn_varlen_func is not None and device.type == "cuda" and dtype != torch.float32
        packed = cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=microbatch.max_seqlen,
            max_seqlen_kv=microbatch.max_seqlen,
            cos=angles.cos().to(dtype),
            sin=angles.sin().to(dtype),
        )
        if not varlen:
            packed.blocks, rows, places = block_layout(cu_seqlens.cpu())
            packed.rows, packed.places = rows.to(device), places.to(device)
        return packed


def block_layout(cu_seqlens: Tensor) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
    """(blocks, rows, places) of `PackedSequences` for sequences bounded by `cu_seqlens` [n + 1].

    Sequences are taken longest first; one shorter than `MIN_FILL` of the block's first opens a new block. A padded place repeats
    the sequence's last token, so that it holds something finite.
    """
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    order = lengths.argsort(descending=True, stable=True)
    blocks, rows = [], []
    places = torch.empty(int(cu_seqlens[-1]), dtype=torch.int64)
    first, offset = 0, 0
    while first < len(order):
        longest = int(lengths[order[first]])
        count = int((lengths[order[first:]] >= MIN_FILL * longest).sum())
        members = order[first : first + count]
        column = torch.arange(longest)
        row = starts[members, None] + column.minimum(lengths[members, None] - 1)
        real = column < lengths[members, None]
        places[row[real]] = offset + real.flatten().nonzero()[:, 0]
        blocks.append((count, longest))
        rows.append(row.flatten())
        first, offset = first + count, offset + row.numel()
    return blocks, torch.cat(rows), places


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
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params: PackedSequences = None
    ) -> Tensor:
        packed = packed_seq_params
        query, key = rotate(query, packed.cos, packed.sin), rotate(key, packed.cos, packed.sin)
        if not packed.blocks:
            cu_seqlens, longest = packed.cu_seqlens_q, packed.max_seqlen_q
            return flash_attn_varlen_func(query, key, value, cu_seqlens, cu_seqlens, longest, longest, causal=True).flatten(1)
        query, key, value = (_Take.apply(x, packed.rows, packed.places) for x in (query, key, value))
        outputs, start = [], 0
        for count, length in packed.blocks:
            span = slice(start, start + count * length)
            q, k, v = (x[span].unflatten(0, (count, length)).transpose(1, 2) for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            outputs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
            start = span.stop
        return _Return.apply(torch.cat(outputs) if len(outputs) > 1 else outputs[0], packed.places)
