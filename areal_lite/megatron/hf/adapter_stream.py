"""The live adapters alone, collected on global rank 0 for pushes without the weights they adapt."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from areal_lite.megatron.architectures import layout
from areal_lite.megatron.architectures.parameters import RowParallel
from areal_lite.megatron.hf.stream import Bucket, WeightStream
from areal_lite.megatron.lora import adapters
from areal_lite.megatron.model import Backbone

# What a tensor's name ends with, in place of `.weight` of the weight that it adapts, as in PEFT.
_A, _B = ".lora_A.weight", ".lora_B.weight"


class AdapterStream(WeightStream):
    """Buckets of A [rank, in] and B [out, rank] of every adapted Hugging Face weight, on rank 0.

    Both are in one bucket, A first. Projections that Megatron fuses share one A, so each of them
    has a copy of it. All ranks construct the stream together.
    """

    def _parameters(self, chunks: Sequence[Backbone]) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for weight, adapter in adapters(chunks):
            yield weight.removesuffix(".weight") + _A, adapter.a
            yield weight.removesuffix(".weight") + _B, adapter.b

    def _is_replicated(self, name: str) -> bool:
        # A row-parallel layer splits its inputs, and so A. Other layers split their outputs, and B.
        weight = _adapted(name)
        return isinstance(layout(weight, self.hf), RowParallel) == name.endswith(_B)

    def _join(self, name: str, shards: list[Tensor]) -> Bucket:
        plan = layout(_adapted(name), self.hf)
        end = name.removeprefix(_adapted(name).removesuffix(".weight"))
        names = [weight.removesuffix(".weight") + end for weight in plan.names]
        if end == _B and not self._is_replicated(name):
            return list(zip(names, plan.join(self.hf, shards), strict=True))
        whole = shards[0] if len(shards) == 1 else torch.cat(shards, 1)
        return [(each, whole) for each in names]

    def _may_begin_bucket(self, name: str) -> bool:
        return name.endswith(_A)

    def _value(self, name: str) -> Tensor:
        return self.own[name].detach()


def _adapted(name: str) -> str:
    """Return the weight that A or B adapts."""
    return name.removesuffix(_A).removesuffix(_B) + ".weight"
