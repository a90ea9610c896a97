"""Causal self-attention over packed sequences, with rotary embedding, as Megatron's core attention.

Attention is computed in one of three ways:

* In half precision on a GPU: over the packed tokens, by PyTorch's FlashAttention 2.
* By a kernel of the device over the packed tokens, where it has one that fits (kernels.py).
* Otherwise one sequence after the other. Padded blocks of sequences were no faster on a CPU.

Segments see the keys of prefixes that they share, and under context parallelism keys of all ranks
(packing.py). Bounds of queries and of keys that differ say so to FlashAttention: the last query of
a segment sees all its keys. A shared key is copied for each segment that sees it, for the time that
a layer computes.

A layer may have a window: a token then sees so many tokens, itself and those right before it. Keys
of a segment stand in the order of their positions, from 0 on, so a window needs no positions. A
layer may also go without a rotation, and layers with a window may have one of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_lite.megatron.architectures import ARCHITECTURES, full_rope
from areal_lite.megatron.delta_net import Pieces, SplitRows
from areal_lite.megatron.kernels import Spans, add_sink, kernels, sink_gradient
from areal_lite.megatron.packing import LocalTokens
from areal_lite.megatron.parallel import process_group, whole_weight
from areal_lite.megatron.parameters import head_dim

Segment = tuple[int, int]  # tokens of its queries, and of its keys


class Rotation(NamedTuple):
    """A rotary embedding (arXiv:2104.09864): a token is turned by position x frequencies."""

    frequencies: Tensor  # float32 [n / 2], radians per position, of the first n elements of a head
    factor: float  # of the results (YaRN, arXiv:2309.00071)


def rotations(hf: PretrainedConfig, device: torch.device) -> list[Rotation]:
    """Return the rotary embeddings of the layers; the last one is for layers with a window.

    Plain frequencies are theta^(-2i / n).
    """
    rope, family = full_rope(hf), ARCHITECTURES[hf.model_type]
    kind = rope.get("rope_type", "default")
    width = int(head_dim(hf) * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    windowed = hf.rope_parameters.get("sliding_attention", rope)
    plain, local = (Rotation(1 / r["rope_theta"] ** exponents, 1.0) for r in (rope, windowed))
    if kind != "default":
        layers = {} if rope is hf.rope_parameters else {"layer_type": "full_attention"}
        plain = Rotation(*ROPE_INIT_FUNCTIONS[kind](hf, device, **layers))
    return [plain, local] if family.plain_in_windows or windowed is not rope else [plain]


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, and what this attention needs besides."""

    # (cos, sin), [l, 1, n] each, of the angles of each token's position, for the first n elements
    # of a head. The last pair is for layers with a window, the first one for all others.
    angles: list[tuple[Tensor, Tensor]]
    # int64, the gathered index of each key. None where the keys are the segments' own tokens.
    key_index: Tensor | None = None
    segments: list[Segment] | None = None  # where attention is computed one after the other
    spans: Spans | None = None  # for the kernel; else None
    pieces: Pieces | None = None  # for gated delta nets (delta_net.py)

    @classmethod
    def build(
        cls, local: LocalTokens, rotations: list[Rotation], head_dim: int, dtype: torch.dtype
    ) -> "PackedSequences":
        """Describe `local`, in CPU memory, on the device of `rotations`.

        dtype: of the activations.
        """
        like = rotations[0].frequencies
        device = like.device
        positions = local.position_ids.to(device).float()
        cu_seqlens_q = local.cu_seqlens
        cu_seqlens_k = cu_seqlens_q if local.cu_seqlens_k is None else local.cu_seqlens_k
        key_index, segments, spans = local.key_index, None, None
        longest = int(cu_seqlens_k.diff().max())
        if kernels.packed_attention and kernels.packed_fits(like, dtype, head_dim, longest):
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
            angles=[_angles(rotation, positions, dtype) for rotation in rotations],
            key_index=None if key_index is None else key_index.to(device),
            segments=segments,
            spans=spans,
        )


def _angles(rotation: Rotation, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of `positions`, float32 [l], as `PackedSequences.angles`."""
    angles = positions[:, None] * rotation.frequencies
    angles = torch.cat((angles, angles), -1)[:, None]
    dtype = torch.float32 if kernels.exact_rotation else dtype
    return (angles.cos() * rotation.factor).to(dtype), (angles.sin() * rotation.factor).to(dtype)


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence.

    query [t, heads, dim], key and value [t, groups, dim] -> [t, heads * dim]. The window of a layer
    and whether it rotates are in Megatron's fields: window_size, window_attn_skip_freq (1: it has a
    window) and no_rope_freq (1: it does not rotate), one entry for each layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale: float | None = None,
        **_,
    ):
        super().__init__(config=config)
        assert config.kv_channels is not None
        self.scale = softmax_scale or config.kv_channels**-0.5
        windows, without = config.window_attn_skip_freq, config.no_rope_freq
        self.window: int | None = None
        if isinstance(windows, list) and windows[layer_number - 1]:
            assert config.window_size is not None
            self.window = config.window_size[0] + 1
        self.heads: SplitRows | None = None
        if config.softmax_type == "learnable":
            self.heads = SplitRows(config, sinks=(config.num_attention_heads,))
        self.rotates = not (isinstance(without, list) and without[layer_number - 1])

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_, packed_seq_params: Any, **__
    ) -> Tensor:
        if self.rotates:
            angles = packed_seq_params.angles[0 if self.window is None else -1]
            query, key = _rotate(query, *angles), _rotate(key, *angles)
        return self.attend(query, key, value, packed_seq_params)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        """Attend with queries and keys that are rotated."""
        group = process_group(parallel_state.get_context_parallel_group())
        if group.size() > 1:
            both = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=group)
            key, value = both.chunk(2, -1)
        sinks: Any = self.heads and self.heads.sinks
        rest = self.window, self.scale, sinks
        if packed.spans is not None:
            assert kernels.packed_attention is not None
            return kernels.packed_attention(query, key, value, packed.spans, *rest).flatten(1)
        with _seen(key, value, packed.key_index) as (key, value):
            if packed.segments is not None:
                return by_segment(query, key, value, packed.segments, *rest).flatten(1)
            bounds = packed.cu_seqlens_q, packed.cu_seqlens_kv
            longest = packed.max_seqlen_q, packed.max_seqlen_kv
            key, value = key.contiguous(), value.contiguous()
            return causal_varlen(query, key, value, *bounds, *longest, *rest).flatten(1)


class LatentAttention(MegatronModule):
    """Multi-latent attention (arXiv:2405.04434), in place of Megatron's self-attention.

    From one short vector of a token come its keys and values of all heads, and maybe from another
    its queries. One more part of its key, the same for all heads, is rotated, as a part of each
    query is. Every rank computes the short vectors of its own tokens.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, hf: Any, proj: Any, norm: Any, **_: Any
    ):
        super().__init__(config)
        self.group = process_group(parallel_state.get_tensor_model_parallel_group())
        self.own, number = config.num_attention_heads // self.group.size(), hf.num_attention_heads
        self.plain, self.value = hf.qk_nope_head_dim, hf.v_head_dim
        self.parts, width = (hf.kv_lora_rank, hf.qk_rope_head_dim), hf.qk_head_dim
        options: dict[str, Any] = {"config": config, "init_method": config.init_method}
        options |= {"bias": False, "is_expert": False, "tp_group": self.group}

        def up(inputs: int, outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(inputs, number * outputs, gather_output=False, **options)

        if hf.q_lora_rank is None:
            self.q_proj = up(config.hidden_size, width)
        else:
            self.q_down = whole_weight(config, hf.q_lora_rank, config.hidden_size)
            self.q_norm = norm(config, hf.q_lora_rank, config.layernorm_epsilon)
            self.q_up = up(hf.q_lora_rank, width)
        self.kv_down = whole_weight(config, sum(self.parts), config.hidden_size)
        self.kv_norm = norm(config, hf.kv_lora_rank, config.layernorm_epsilon)
        self.kv_up = up(hf.kv_lora_rank, self.plain + self.value)
        options |= {"input_is_parallel": True, "skip_bias_add": True}
        self.proj = build_module(proj, number * self.value, config.hidden_size, **options)
        self.core = PackedAttention(config, layer_number, None, None, config.softmax_scale)

    def forward(self, hidden_states: Tensor, packed_seq_params: Any = None, **_: Any):
        """Compute [l / tp, 1, hidden] -> the same shape, and no bias."""
        angles = packed_seq_params.angles[0]

        def heads(x: tuple[Tensor, Any]) -> Tensor:
            return x[0][:, 0].unflatten(1, (self.own, -1))

        def turn(x: Tensor) -> Tensor:  # a file has pairs side by side
            return _rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), *angles)

        if hasattr(self, "q_proj"):
            query = heads(self.q_proj(hidden_states))
        else:
            query = heads(self.q_up(self.q_norm(F.linear(hidden_states, self.q_down))))
        latent, turned = F.linear(hidden_states, self.kv_down).split(self.parts, -1)
        turned = turn(gather_from_sequence_parallel_region(turned, group=self.group))
        kv = heads(self.kv_up(self.kv_norm(latent)))
        key, value = kv.split((self.plain, self.value), -1)
        query = torch.cat((query[..., : self.plain], turn(query[..., self.plain :])), -1)
        key = torch.cat((key, turned.expand(-1, self.own, -1)), -1)
        # Attention computes heads of one size.
        value = F.pad(value, (0, query.shape[-1] - self.value))
        out = self.core.attend(query, key, value, packed_seq_params)
        out = out.unflatten(1, (self.own, -1))[..., : self.value].flatten(1)
        return self.proj(out[:, None])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first elements of each head, as many as `cos` has: [t, heads, dim]."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return kernels.rotate(x, cos, sin)
    return torch.cat((kernels.rotate(x[..., :width], cos, sin), x[..., width:]), -1)


class _Copies(torch.autograd.Function):
    """Copy the rows of x at `index`. Their gradients are added up in float32 or better."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,), grad = ctx.saved_tensors, grads[0]
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.rows, grad[0].numel(), dtype=dtype)
        total.index_add_(0, index, grad.flatten(1).to(dtype))
        return total.to(grad.dtype).unflatten(1, grad.shape[1:]), None


@contextmanager
def _seen(key: Tensor, value: Tensor, index: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Copy the keys and values at `index`, one after the other; None stands for all of them.

    What attention keeps of the copies for backward is copied again there. So a key that many
    segments see is kept once.
    """
    if index is None:
        yield key, value
        return

    def layout(x: Tensor) -> tuple:
        return x.data_ptr(), x.shape, x.stride()

    copies = _Copies.apply(key, index), _Copies.apply(value, index)
    sources = {layout(x): source.detach() for x, source in zip(copies, (key, value))}

    def pack(x: Tensor) -> Tensor | tuple[Tensor]:
        return (sources[layout(x)],) if layout(x) in sources else x

    def unpack(x: Tensor | tuple[Tensor]) -> Tensor:
        return x if isinstance(x, Tensor) else x[0].index_select(0, index)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield copies


def by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: list[Segment],
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within one segment after the other, as `causal_varlen` does: [l, heads, dim]."""
    outputs = []
    queries, keys = map(list, zip(*segments))
    for parts in zip(query.split(queries), key.split(keys), value.split(keys)):
        before = len(parts[1]) - len(parts[0])
        mask = None
        narrow = window is not None and window < len(parts[1])
        if before or narrow or sinks is not None:
            shape = len(parts[0]), len(parts[1])
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(before)
        if mask is not None and window is not None:
            mask = mask.triu(before - window + 1)
        if sinks is not None and mask is not None:
            parts, mask = _with_sink(parts, mask, sinks)
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        options: Any = dict(
            is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1], scale=scale
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _with_sink(
    parts: tuple[Tensor, ...], mask: Tensor, sinks: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Add a key with the scores `sinks` [heads] and no value to a segment's query, key and value.

    Its mask, bool [queries, keys], becomes one of numbers for each head.
    """
    query, *others = parts
    none = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    columns = none.expand(len(sinks), -1, -1), sinks[:, None, None].expand(-1, len(query), 1)
    longer = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in others)
    return (query, *longer), torch.cat(columns, -1)[None]


def causal_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over packed tokens by FlashAttention: [l, heads, dim].

    Where a segment has more keys than queries, its last query sees all of them, or the last
    `window` of them. sinks: [heads], scores of a key without a value, which all queries see.
    """
    bounds = bounds_q, bounds_k, longest_q, longest_k
    grouped = query.shape[1] != key.shape[1]
    before = -1 if window is None else window - 1
    if sinks is not None:
        settings = scale, (before, 0), grouped
        return _SinkAttention.apply(query, key, value, sinks, bounds, settings)  # pyright: ignore[reportReturnType]
    options: Any = dict(window_size=(before, 0), enable_gqa=grouped, scale=scale)
    out = varlen_attn(query, key, value, *bounds, **options)
    assert isinstance(out, Tensor)
    return out


class _SinkAttention(torch.autograd.Function):
    """FlashAttention with a sink, whose share of the softmax is taken from the result afterwards.

    What FlashAttention reads in its backward pass, the result and the logarithm of the softmax's
    sum, then includes the sink, so its gradients are right as they are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        bounds: tuple,
        settings: tuple,
    ) -> Tensor:
        scale, window, grouped = settings
        options: Any = dict(window_size=window, enable_gqa=grouped, scale=scale)
        out, sums = varlen_attn(
            query, key, value, *bounds, return_aux=AuxRequest(lse=True), **options
        )
        out, sums = add_sink(out, sums, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        ctx.settings = *bounds, window == (-1, 0), scale, list(window)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks, out, sums = ctx.saved_tensors
        *bounds, causal, scale, window = ctx.settings
        grad, unused = grads[0].contiguous(), torch.zeros(2, dtype=torch.uint64, device=out.device)
        found = torch.ops.torch_attn._varlen_attn_backward(
            grad, query, key, value, out, sums, *bounds, causal, unused, scale, window
        )
        return *found, sink_gradient(grad, out, sums, sinks), None, None
