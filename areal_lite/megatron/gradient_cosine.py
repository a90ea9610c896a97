"""The cosine of the gradients of consecutive updates.

It is near 0 when batches are fresh and near 1 when stale batches push the same way again and again,
which overshoots (GAC, arXiv 2603.01501).
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_lite.megatron.parallel import current_device


class GradientCosine:
    """Compares each gradient with the one before it.

    Every rank keeps a bfloat16 copy of its shard of the gradient: 2 bytes a parameter, divided by
    the data-parallel ranks.
    """

    def __init__(self, optimizer: Any):
        self._optimizers = optimizer.chained_optimizers  # experts have an optimizer of their own
        self._last: list[list[Tensor]] = []

    def compare(self) -> dict[str, float]:
        """Return the cosine as `grad_cosine`; nothing at first, or if a gradient is 0.

        Every rank calls it, between the reduction of the gradients and the update.
        """
        # The gradients that count in the norm: a parameter of several ranks counts once.
        shards = [optimizer.get_main_grads_for_grad_norm() for optimizer in self._optimizers]
        last, self._last = self._last, [[grad.bfloat16() for grad in shard] for shard in shards]
        if not last:
            return {}
        dot, now, before = 0.0, 0.0, 0.0
        for optimizer, old, new in zip(self._optimizers, last, self._last):
            sums = torch.zeros(3, dtype=torch.float64, device=current_device())
            for a, b in zip(old, new):
                a, b = a.float(), b.float()
                sums += torch.stack([(a * b).sum(), (b * b).sum(), (a * a).sum()])
            dist.all_reduce(sums, group=optimizer.get_grad_stats_parallel_group())
            dot, now, before = (x + y for x, y in zip((dot, now, before), sums.tolist()))
        return {"grad_cosine": dot / math.sqrt(now * before)} if now and before else {}
