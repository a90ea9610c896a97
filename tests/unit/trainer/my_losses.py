"""Losses of one's own, for the tests of `algo.loss=module:name`."""

import torch

from areal_lite.algo.objective import OwnLoss, TokenLoss

prepared: list[int] = []


def plain(tokens, logprobs, algo):
    """Return losses alone."""
    return -tokens.advantages * (logprobs - tokens.prox).exp() * (1 + algo.eps_low)


def prepare(tokens, algo, reduce):
    """Count the tokens of the update on all ranks, and compute a number of each sequence."""
    prepared.append(len(tokens.mask))
    count = reduce(tokens.mask.sum().double())
    return {"count": count, "by_sequence": 0.5 * tokens.rewards, "lr_factor": 0.25}


def with_totals(tokens, logprobs, algo, count, by_sequence):
    """Leave out tokens that are likelier than before. Behavior log-probs are finite."""
    assert torch.isfinite(tokens.behavior).all()
    losses = (count.sqrt() + by_sequence[tokens.sequence_ids]) * (logprobs - tokens.behavior)
    kept = logprobs.detach() < tokens.prox
    return TokenLoss(losses, kept, {"difference": logprobs - tokens.behavior})


def proportional(tokens, logprobs, algo):
    return -tokens.advantages * logprobs


def mean(tokens, logprobs, algo):
    """Return a single number, which no microbatch can weigh."""
    return proportional(tokens, logprobs, algo).mean()


totals = OwnLoss(with_totals, prepare)
skipping = OwnLoss(proportional, zero_without_advantage=True)
