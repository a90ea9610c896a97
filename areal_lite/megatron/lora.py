"""Low-rank adapters beside linear layers (LoRA; Hu et al., 2021, arXiv:2106.09685).

docs/training.md (Adapters) has the formula. A [rank, in] starts uniform in ±1 / sqrt(in) (Kaiming,
as in PEFT). Under tensor parallelism:

    layer             A                 B
    column-parallel   whole             rows, as W has
    row-parallel      columns, as W has whole

The ranks exchange z = A x and its gradient, `rank` numbers for each token. The matrix that every
rank has whole sees this rank's tokens only. Megatron then sums its gradient over the ranks, as for
norms.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from areal_lite.config import LoraConfig
from areal_lite.megatron.parallel import process_group

if TYPE_CHECKING:
    from areal_lite.megatron.model import Backbone


# Turns z into that of the output's tokens, for a layer whose outputs or inputs are split.
_EXCHANGES = (gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region)


class Adapter(torch.nn.Module):
    """A and B beside one linear layer, whose `weight` is W, [out, in] or this rank's part of it.

    split: the dimension along which ranks split W: 0 its outputs, 1 its inputs.
    """

    def __init__(self, layer: Any, lora: LoraConfig, split: int):
        super().__init__()
        self.scale = lora.alpha / lora.rank
        self.active = True
        self.inputs = layer.input_size  # of all ranks
        self._split = split
        self._group = process_group(layer.tp_group)
        self._exchange = partial(_EXCHANGES[split], group=self._group)
        rows, columns = layer.weight.shape
        self.a = torch.nn.Parameter(layer.weight.new_empty(lora.rank, columns))
        self.b = torch.nn.Parameter(layer.weight.new_zeros(rows, lora.rank))
        whole, part = (self.a, self.b) if split == 0 else (self.b, self.a)
        # Megatron counts a part on every rank in the norm of the gradient. It sums the gradient of
        # what sees the tokens of one rank.
        set_tensor_model_parallel_attributes(part, True, split, 1)
        whole.sequence_parallel = layer.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Add s B A x to `output`, the result of the layer for its input x."""
        if not self.active:
            return output
        z = self._exchange(F.linear(x, self.a))
        rows = output.flatten(0, -2)
        return rows.addmm(z.flatten(0, -2), self.b.t(), alpha=self.scale).view_as(output)

    @torch.no_grad()
    def initialize(self, seed: int, name: str) -> None:
        """Set A to what `seed` and `name` determine, in any layout of the ranks, and B to zero."""
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
        bound = 1 / math.sqrt(self.inputs)
        whole = torch.empty(len(self.a), self.inputs).uniform_(-bound, bound, generator=generator)
        if self._split == 1:
            whole = whole.chunk(self._group.size(), 1)[self._group.rank()]
        self.a.copy_(whole)
        self.b.zero_()

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Compute W + s B A in float32, rounded once to the dtype of `weight`, this rank's W."""
        exact = torch.promote_types(weight.dtype, torch.float32)
        factors = self.b.to(exact), self.a.to(exact)
        return torch.addmm(weight.to(exact), *factors, alpha=self.scale).to(weight.dtype)

    @torch.no_grad()
    def squares(self, weight: Tensor) -> Tensor:
        """Return the squared Frobenius norms of s B A and of `weight`: this rank's parts, float32.

        The first is tr(B^T B A A^T), so that B A is never made.
        """
        a, b = self.a.float(), self.b.float()
        added = self.scale**2 * ((b.t() @ b) * (a @ a.t())).sum()
        return torch.stack((added, torch.linalg.vector_norm(weight, dtype=torch.float32).square()))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ):
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"b": 0} if self._split == 0 else {"a": 1},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class _Adapted(torch.nn.Module):
    """A linear layer of Megatron, the next base class, with an adapter; `split` as there."""

    split: int

    def __init__(self, *sizes: int, lora: LoraConfig, **options: Any):
        super().__init__(*sizes, **options)
        self.adapter = Adapter(self, lora, self.split)

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        output, bias = super().forward(input_, *args, **options)
        return self.adapter(input_, output), bias

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)


class AdaptedColumnParallelLinear(_Adapted, ColumnParallelLinear):
    split = 0


class AdaptedGatedLinear(AdaptedColumnParallelLinear):
    """Gate and up projection in one layer. A rank stacks its parts of the two."""

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        b = f"{prefix}adapter.b"
        # A checkpoint has all of the gate before all of the up projection, as it has of weights.
        return state | {b: apply_swiglu_sharded_factory(state[b], sharded_offsets)}


class AdaptedRowParallelLinear(_Adapted, RowParallelLinear):
    split = 1


# The layers that `trainer.lora.targets` names: without an adapter, and with one.
_LAYERS = {
    "qkv": (ColumnParallelLinear, AdaptedColumnParallelLinear),
    "proj": (RowParallelLinear, AdaptedRowParallelLinear),
    "fc1": (ColumnParallelLinear, AdaptedGatedLinear),
    "fc2": (RowParallelLinear, AdaptedRowParallelLinear),
}


def linear_layer(name: str, lora: LoraConfig) -> type | ModuleSpec:
    """Return what Megatron builds the layer `name` of trainer.lora.targets from."""
    plain, adapted = _LAYERS[name]
    if lora.rank and name in lora.targets:
        return ModuleSpec(module=adapted, params={"lora": lora})
    return plain


def freeze_base(model: Backbone) -> None:
    """Let adapters alone be trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    if model.pre_process and model.config.recompute_granularity == "full":
        # A layer that is computed again has gradients only if its input has one.
        model.embedding.register_forward_hook(lambda _, args, output: output.requires_grad_())


def is_adapter(name: str) -> bool:
    """Return whether the parameter belongs to an adapter."""
    return name.endswith((".adapter.a", ".adapter.b"))


def adapters(chunks: Sequence[Backbone]) -> Iterator[tuple[str, Adapter]]:
    """Iterate over this rank's adapters, by the name of the weight in the whole model."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, Adapter):
                yield f"{chunk.global_name(name).removesuffix('.adapter')}.weight", module


def added_share(chunks: Sequence[Backbone]) -> float:
    """Return ||s B A|| / ||W|| over all adapted weights, in Frobenius norms. Every rank calls it.

    Ranks with the same parts are equally many for each part, so they do not change the ratio.
    """
    squares = torch.zeros(2, device=next(chunks[0].parameters()).device)
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, _Adapted):
                assert isinstance(layer.weight, Tensor)
                squares += layer.adapter.squares(layer.weight)
    dist.all_reduce(squares)
    return (squares[0] / squares[1]).sqrt().item()


@contextmanager
def without_adapters(chunks: Sequence[Backbone]) -> Iterator[None]:
    """Let the model compute what it did before training, inside the block."""
    found = [adapter for _, adapter in adapters(chunks)]
    for adapter in found:
        adapter.active = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.active = True
