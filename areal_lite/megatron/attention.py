"""Causal self-attention over packed sequences, with rotary embedding, as Megatron's core attention.

Attention is computed in one of three ways:

* In half precision on a GPU: over the packed tokens, by PyTorch's FlashAttention 2.
* By a kernel of the device over the packed tokens, where it has one that fits (kernels.py).
* Otherwise one sequence after the other. Padded blocks of sequences were no faster on a CPU.

Segments see the keys of prefixes that they share, and under context parallelism those of all ranks
(packing.py). Bounds of queries and of keys that differ say so to FlashAttention: the last query of
a segment sees all its keys. A shared key is copied for each segment that sees it, for the time that
a layer computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from areal_lite.megatron.kernels import Spans, kernels
from areal_lite.megatron.packing import LocalTokens
from areal_lite.megatron.parallel import process_group

Segment = tuple[int, int]  # tokens of its queries, and of its keys


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, and what this attention needs besides."""

    cos: Tensor  # [l, 1, head_dim], of the angle of each token's position
    sin: Tensor
    # int64, the gathered index of each key. None where the keys are the segments' own tokens.
    key_index: Tensor | None = None
    segments: list[Segment] | None = None  # where attention is computed one after the other
    spans: Spans | None = None  # for the kernel; else None

    @classmethod
    def build(cls, local: LocalTokens, inv_freq: Tensor, dtype: torch.dtype) -> "PackedSequences":
        """Describe `local`, in CPU memory, on the device of `inv_freq`, float32 [head_dim / 2].

        dtype: of the activations.
        """
        device = inv_freq.device
        angles = local.position_ids[:, None].to(device).float() * inv_freq
        angles = torch.cat((angles, angles), -1)[:, None]
        rotation = torch.float32 if kernels.exact_rotation else dtype
        cu_seqlens_q = local.cu_seqlens
        cu_seqlens_k = cu_seqlens_q if local.cu_seqlens_k is None else local.cu_seqlens_k
        key_index, segments, spans = local.key_index, None, None
        longest = int(cu_seqlens_k.diff().max())
        kernel, head_dim = kernels.packed_attention, 2 * len(inv_freq)
        if kernel and kernel.fits(inv_freq, dtype, head_dim, longest):
            index = torch.arange(len(local.tokens)) if key_index is None else key_index
            bounds = cu_seqlens_q.long().numpy(), cu_seqlens_k.long().numpy()
            spans = Spans(queries=bounds[0], keys=bounds[1], index=index.numpy())
        elif not kernels.varlen or dtype == torch.float32:
            segments = list(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()))
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens_q.to(device),
            cu_seqlens_kv=cu_seqlens_k.to(device),
            max_seqlen_q=int(cu_seqlens_q.diff().max()),
            max_seqlen_kv=longest,
            cos=angles.cos().to(rotation),
            sin=angles.sin().to(rotation),
            key_index=None if key_index is None else key_index.to(device),
            segments=segments,
            spans=spans,
        )


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
        group = process_group(parallel_state.get_context_parallel_group())
        if group.size() > 1:
            both = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=group)
            key, value = both.chunk(2, -1)
        if packed.spans is not None:
            assert kernels.packed_attention is not None
            return kernels.packed_attention(query, key, value, packed.spans).flatten(1)
        with _seen(key, value, packed.key_index) as (key, value):
            if packed.segments is not None:
                return by_segment(query, key, value, packed.segments).flatten(1)
            return causal_varlen(
                query,
                key.contiguous(),
                value.contiguous(),
                packed.cu_seqlens_q,
                packed.cu_seqlens_kv,
                packed.max_seqlen_q,
                packed.max_seqlen_kv,
            ).flatten(1)


@contextmanager
def _seen(key: Tensor, value: Tensor, index: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Copy the keys and values at `index`, one after the other; None stands for all of them.

    What attention keeps of the copies for backward is copied again there. So a key that many
    segments see is kept once.
    """
    if index is None:
        yield key, value
        return

    def copy(x: Tensor) -> Tensor:
        # The gradient of an embedding is added up in float32, also in half precision.
        return F.embedding(index, x.flatten(1)).unflatten(1, x.shape[1:])

    def layout(x: Tensor) -> tuple:
        return x.data_ptr(), x.shape, x.stride()

    copies = copy(key), copy(value)
    sources = {layout(x): source.detach() for x, source in zip(copies, (key, value))}

    def pack(x: Tensor) -> Tensor | tuple[Tensor]:
        return (sources[layout(x)],) if layout(x) in sources else x

    def unpack(x: Tensor | tuple[Tensor]) -> Tensor:
        return x if isinstance(x, Tensor) else copy(x[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield copies


def by_segment(query: Tensor, key: Tensor, value: Tensor, segments: list[Segment]) -> Tensor:
    """Attend within one segment after the other, as `causal_varlen` does: [l, heads, dim]."""
    outputs = []
    queries, keys = map(list, zip(*segments))
    for parts in zip(query.split(queries), key.split(keys), value.split(keys)):
        before = len(parts[1]) - len(parts[0])
        mask = None
        if before:
            shape = len(parts[0]), len(parts[1])
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(before)
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def causal_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
) -> Tensor:
    """Attend over packed tokens by FlashAttention: [l, heads, dim].

    Where a segment has more keys than queries, its last query sees all of them.
    """
    bounds = bounds_q, bounds_k, longest_q, longest_k
    grouped = query.shape[1] != key.shape[1]
    out = varlen_attn(query, key, value, *bounds, window_size=(-1, 0), enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out
