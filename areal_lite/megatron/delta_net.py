"""Gated delta net: a layer that sees earlier tokens of its sequence through a state.

Each value head has a state S [d_k, d_v], zero at first. A token updates it with its key k, its
value v, a decay g <= 0 and a step size b, and reads it with its query q (Yang et al., 2024,
arXiv:2412.06464):

    S <- e^g S,        S <- S + b k (v - S^T k)^T,        output S^T q

Query, key and value first go through a short convolution over the tokens before them.

Tokens are computed in *pieces*: a piece is a chain of tokens of the trie (prefixes.py), so at most
its last token is followed by several. Inside a piece there are matrix products instead of a loop
(the WY form; arXiv:2406.06484). A piece starts from the final state of its parent, the piece that
ends right before it, and the convolution reads the last tokens there. So packed sequences never see
each other, and a prefix that sequences share is computed once. Pieces whose parents are done form a
*level*, and are computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_lite.megatron.packing import LocalTokens
from areal_lite.megatron.parallel import current_device, process_group
from areal_lite.megatron.prefixes import ragged_arange

LONGEST = 32
"""Tokens of a piece without the kernels of fla: the fastest of 16, 32, 64 and 128 on a CPU."""


class Level(NamedTuple):
    """m pieces of `size` tokens together, padding included."""

    parents: Tensor  # int64 [m], the number of each one's parent in the level before
    bounds: Tensor  # int64 [m + 1], of the pieces
    size: int


@dataclass(slots=True)
class Pieces:
    """l packed tokens, divided into pieces."""

    taps: Tensor  # int64 [k - 1, l], the tokens 1, 2, … before each one in its sequence; l: none
    order: Tensor  # int64 [p], the tokens level by level, each piece padded to LONGEST; l: padding
    place: Tensor  # int64 [l], of each token in `order`
    levels: list[Level]

    @classmethod
    def build(
        cls, local: LocalTokens, kernel: int, device: torch.device, dtype: torch.dtype
    ) -> Pieces:
        """Divide `local`, in CPU memory, for a convolution over `kernel` tokens of `dtype`."""
        own = keys = local.cu_seqlens.numpy().astype(np.int64)
        size, counts, path = own[-1], np.diff(own), np.arange(own[-1])
        if local.key_index is not None and local.cu_seqlens_k is not None:
            keys, path = local.cu_seqlens_k.numpy().astype(np.int64), local.key_index.numpy()
        # The position of each token among those that its segment sees.
        at = np.repeat(np.diff(keys) - counts, counts) + ragged_arange(counts)
        steps = np.arange(1, kernel)[:, None]
        before = path[np.repeat(keys[:-1], counts) + np.maximum(at - steps, 0)]
        taps = np.where(at >= steps, before, size)
        # A piece begins with a segment, and right after a token where another segment branches off.
        forks = taps[0][own[:-1][counts > 0]]
        begins = np.zeros(size + 1, bool)
        begins[own[:-1]] = begins[forks[forks < size] + 1] = True
        padded = fused_rule(device.type, dtype) is None
        order, levels = _by_levels(np.flatnonzero(begins[:-1]), taps[0], padded)
        place = np.empty(size + 1, np.int64)
        place[order] = np.arange(len(order))

        def move(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x).to(device)

        found = [Level(move(above), move(bounds), int(bounds[-1])) for above, bounds in levels]
        return cls(move(taps), move(order), move(place[:-1]), found)


def _by_levels(
    starts: np.ndarray, previous: np.ndarray, padded: bool
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Return the order of `Pieces`, and parents and bounds of its levels.

    starts: the first token of each piece; previous: int64 [l], the token before each one in its
    sequence, l for none; padded: pieces are cut and padded to LONGEST tokens.
    """
    size = len(previous)
    if padded:
        parts = -(-np.diff(np.append(starts, size)) // LONGEST)
        starts = np.repeat(starts, parts) + LONGEST * ragged_arange(parts)
    lengths = np.diff(np.append(starts, size))
    piece = np.append(np.repeat(np.arange(len(starts)), lengths), -1)
    parents = piece[previous[starts]]  # each before its children; -1: none
    depth = np.full(len(starts) + 1, -1)
    for number, parent in enumerate(parents.tolist()):
        depth[number] = depth[parent] + 1
    counts = np.bincount(depth[:-1])
    pieces = np.argsort(depth[:-1], kind="stable")
    number = np.empty_like(pieces)  # of each piece in its level
    number[pieces] = ragged_arange(counts)
    lengths, levels = lengths[pieces], np.split(pieces, np.cumsum(counts)[:-1])
    widths = np.full_like(lengths, LONGEST) if padded else lengths
    column = ragged_arange(widths)
    real = column < np.repeat(lengths, widths)
    order = np.where(real, np.repeat(starts[pieces], widths) + column, size)
    both = zip(levels, np.split(widths, np.cumsum(counts)[:-1]))
    return order, [(number[parents[level]], np.cumsum([0, *some])) for level, some in both]


class SplitRows(torch.nn.Module):
    """Parameters whose rows are split over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, **shapes: tuple[int, ...]):
        super().__init__()
        self.group = process_group(parallel_state.get_tensor_model_parallel_group())
        for name, (rows, *rest) in shapes.items():
            shape = rows // self.group.size(), *rest
            own = torch.ones(shape, dtype=config.params_dtype, device=current_device())
            self.register_parameter(name, torch.nn.Parameter(own))
            set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata: Any = None):
        state = self.state_dict(prefix="", keep_vars=True)
        axes, groups = dict.fromkeys(state, 0), metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets, tp_group=self.group, dp_cp_group=groups
        )


class GatedDeltaNet(MegatronModule):
    """The layer, in place of Megatron's self-attention; tensor-parallel ranks divide its heads.

    Rows of its input projection belong to groups: a key head and its value heads. A group has the
    rows of query, key, values, gates, and for each value head of step size and decay.
    """

    def __init__(self, config: TransformerConfig, in_proj: Any, out_proj: Any, norm: Any, **_: Any):
        super().__init__(config)
        keys, values = config.linear_num_key_heads or 0, config.linear_num_value_heads or 0
        self.d_k, self.d_v = config.linear_key_head_dim or 0, config.linear_value_head_dim or 0
        self.ratio, width = values // keys, values * self.d_v
        channels = 2 * keys * self.d_k + width
        group = process_group(parallel_state.get_tensor_model_parallel_group())
        self.groups = keys // group.size()
        options: dict[str, Any] = {"config": config, "init_method": config.init_method}
        options |= {"bias": False, "is_expert": False, "tp_group": group}
        sizes = config.hidden_size, channels + width + 2 * values
        self.in_proj = build_module(in_proj, *sizes, gather_output=False, **options)
        convolution = channels, 1, config.linear_conv_kernel_dim or 0
        self.heads: Any = SplitRows(config, conv=convolution, a_log=(values,), dt_bias=(values,))
        self.norm = norm(config, self.d_v, config.layernorm_epsilon)
        options |= {"input_is_parallel": True, "skip_bias_add": True}
        self.out_proj = build_module(out_proj, width, config.hidden_size, **options)

    def forward(self, hidden_states: Tensor, packed_seq_params: Any = None, **_: Any):
        """Compute [l / tp, 1, hidden] -> the same shape, and no bias.

        Of what lies between the two projections, backward keeps the input alone.
        """
        parts = self.in_proj(hidden_states)[0][:, 0], packed_seq_params.pieces
        mixed: Any = checkpoint(self._mix, *parts, use_reentrant=True, preserve_rng_state=False)
        return self.out_proj(mixed[:, None])

    def _mix(self, projected: Tensor, pieces: Pieces) -> Tensor:
        """Compute the input of the output projection, [l, value heads * d_v]."""
        d_k, ratio, values, dtype = self.d_k, self.ratio, self.ratio * self.d_v, projected.dtype
        group = projected.unflatten(1, (self.groups, -1))
        qkv, gate, b, a = group.split((2 * d_k + values, values, ratio, ratio), 2)
        qkv = F.silu(convolve(qkv.flatten(1), self.heads.conv[:, 0], pieces.taps))
        rate = F.softplus(a.flatten(1).float() + self.heads.dt_bias.float())
        decay, step = -self.heads.a_log.float().exp() * rate, b.flatten(1).float().sigmoid()
        qkv, decay, step = (_padded(x, pieces.order) for x in (qkv, decay, step))
        qk, v = qkv.unflatten(1, (self.groups, -1)).split((2 * d_k, values), 2)
        qk = qk.unflatten(2, (2, d_k))
        qk = qk * (qk.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        q, k = qk.repeat_interleave(ratio, 1).unbind(2)
        inputs = q * d_k**-0.5, k, v.reshape(len(v), -1, self.d_v)
        if rule := fused_rule(projected.device.type, dtype):
            inputs = tuple(x.to(dtype) for x in inputs)
        out = over_levels(rule or delta_rule, (*inputs, decay, step), pieces.levels)
        out = self.norm(out.index_select(0, pieces.place).float())
        return (out * F.silu(gate.reshape(out.shape).float())).to(dtype).flatten(1)


def convolve(x: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
    """Convolve each channel with the tokens before: float32 [l, channels].

    weight: [channels, k], its last column for the token itself; taps: as in `Pieces`.
    """
    total = x.float() * weight[:, -1].float()
    for distance, index in enumerate(taps, 1):
        total = total + _padded(x.float(), index) * weight[:, -1 - distance].float()
    return total


def _padded(x: Tensor, index: Tensor) -> Tensor:
    """Select rows of x; the row after the last one is zero."""
    return torch.cat((x, x.new_zeros(1, *x.shape[1:]))).index_select(0, index)


Inputs = tuple[Tensor, ...]
"""Queries and keys [t, heads, d_k], values [t, heads, d_v], decays and steps [t, heads]."""
Rule = Callable[[Inputs, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(inputs, bounds of m pieces, their states [m, heads, d_k, d_v]) -> (outputs, final states)."""


def over_levels(rule: Rule, inputs: Inputs, levels: list[Level]) -> Tensor:
    """Compute the outputs [p, heads, d_v] of all levels; inputs are in the order of `Pieces`."""
    k, v = inputs[1:3]
    states = torch.zeros(len(levels[0].bounds) - 1, *k.shape[1:], v.shape[2], device=k.device)
    outputs = []
    for level, *parts in zip(levels, *(x.split([one.size for one in levels]) for x in inputs)):
        if outputs:
            states = states.index_select(0, level.parents)
        out, states = rule(tuple(parts), level.bounds, states)
        outputs.append(out)
    return torch.cat(outputs)


def delta_rule(inputs: Inputs, bounds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute pieces of LONGEST tokens by matrix products, in float32; a `Rule`.

    A padding token has zeros only, and so changes no state.
    """
    # [pieces, heads, tokens, …]
    parts = (x.unflatten(0, (len(bounds) - 1, LONGEST)).transpose(1, 2) for x in inputs)
    q, k, v, decay, step = parts
    total = decay.cumsum(-1)
    later = torch.ones(LONGEST, LONGEST, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    grown, step = total.exp()[..., None], step[..., None]
    # Row i is what token i adds to the state, once those before it in the piece are taken away.
    mixed = step * (k @ k.transpose(-1, -2)) * between
    sides = torch.cat((step * v, step * grown * k), -1)
    solved = torch.linalg.solve_triangular(mixed, sides, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    added = values - keys @ states
    out = (grown * q) @ states + (q @ k.transpose(-1, -2) * between) @ added
    left = (total[..., -1:] - total).exp()[..., None]
    states = grown[..., -1:, :] * states + (left * k).transpose(-1, -2) @ added
    return out.transpose(1, 2).flatten(0, 1), states


@cache
def fused_rule(device: str, dtype: torch.dtype) -> Rule | None:
    """Return the `Rule` of flash-linear-attention for pieces of any length, if it computes here."""
    if device != "cuda" or dtype == torch.float32 or find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    def rule(inputs: Inputs, bounds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        batch = (x[None].contiguous() for x in inputs)
        state = {"initial_state": states, "output_final_state": True}
        out, states = chunk_gated_delta_rule(*batch, scale=1.0, cu_seqlens=bounds, **state)
        return out[0], states

    return rule
