"""Random ragged batches in float64 and plain views of them, for the tests of areal_lite.algo."""

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import torch

from areal_lite.algo.losses import LossInputs


def ragged(
    seed: int, *, sequences: int = 6, spread: float = 0.5
) -> tuple[LossInputs, torch.Tensor, torch.Tensor]:
    """Return tokens, rewards [n] and group ids [n] of a ragged batch.

    It has an empty sequence, one of a single token and one without an unmasked token.
    Groups have lost members; one behavior log-prob is -inf."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [0, 1, 3] + [rng.randint(1, 9) for _ in range(sequences)]
    ids = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
    t, n = len(ids), len(lengths)

    def noise(scale=1.0):
        return scale * torch.randn(t, generator=g, dtype=torch.float64)

    mask = (torch.rand(t, generator=g) < 0.75) & (ids != 2)
    mask[-1] = True
    behavior = -3 * torch.rand(t, generator=g, dtype=torch.float64)
    prox = behavior + noise(spread)
    logprobs = (prox + noise(spread)).requires_grad_()
    per_sequence = torch.randn(n, generator=g, dtype=torch.float64)
    behavior[rng.randrange(t - 1)] = -math.inf
    rewards = torch.randint(0, 3, (n,), generator=g).double()
    groups = torch.tensor([40 * rng.randint(0, 2) for _ in range(n)])
    return (
        LossInputs(logprobs, prox, behavior, per_sequence[ids], mask, sequence_ids=ids),
        rewards,
        groups,
    )


def rows(x: LossInputs) -> list[list[dict]]:
    """List the usable tokens of each sequence as plain numbers, in order of sequence id."""
    result: list[list[dict]] = [[] for _ in range(int(x.sequence_ids.max()) + 1)]
    weights = [1.0] * len(x.mask) if x.weights is None else x.weights.tolist()
    columns = zip(
        x.logprobs.tolist(),
        x.prox.tolist(),
        x.behavior.tolist(),
        x.advantages.tolist(),
        x.mask.tolist(),
        weights,
    )
    for i, (lp, prox, behav, a, m, weight) in zip(x.sequence_ids.tolist(), columns):
        if m and math.isfinite(behav):
            result[i].append({"lp": lp, "prox": prox, "behav": behav, "a": a, "weight": weight})
    return result


def take(x: LossInputs, index: torch.Tensor) -> LossInputs:
    """The tokens at `index`, in that order."""
    weights = None if x.weights is None else x.weights[index]
    return replace(
        x,
        logprobs=x.logprobs[index],
        prox=x.prox[index],
        behavior=x.behavior[index],
        advantages=x.advantages[index],
        mask=x.mask[index],
        sequence_ids=x.sequence_ids[index],
        weights=weights,
    )


def on_ranks(num: int, function: Callable[[int, Callable], Any]) -> list[Any]:
    """Call function(rank, reduce) on `num` threads; `reduce` sums a tensor over them."""
    barrier, shares = Barrier(num, timeout=60), [torch.zeros(0)] * num

    def on_rank(rank: int) -> Any:
        def reduce(share: torch.Tensor) -> torch.Tensor:
            shares[rank] = share
            barrier.wait()
            total = torch.stack(shares).sum(0)
            barrier.wait()
            return total

        return function(rank, reduce)

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(on_rank, range(num)))
