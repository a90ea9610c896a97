"""From rewards to advantages of trajectories (grpo, rloo) or of tokens (reinforce_plus_plus, gae).

Credit for turns (find_turns, credits, steadied, relative_to_turns) divides the reward of an episode
among the turns in which it was earned. A turn is a run of tokens that the policy sampled, between
tokens of the prompt and of the environment. A workflow may say what each turn earned. The last turn
gets what is then left, so the credits r_1, ..., r_K of a sequence add up to its reward.

A group is the set of trajectories that carry one id, in any order and however many survived.

An episode counts once in means and deviations, however many trajectories (traces) it has: each has
an equal share of it as its weight. A trace with a reward of its own is compared with the same mean.

n trajectories have t tokens and k turns. The tokens of a trajectory stand side by side, in order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.sequences import count_ids, discounted_sum, ends, group_mean


def overlong_penalty(lengths: Tensor, *, max_length: int, margin: int) -> Tensor:
    """Compute the soft overlong punishment to add to the reward (DAPO, arXiv 2503.14476, eq. 13).

    It is 0 up to max_length - margin tokens, falls linearly to -1 at max_length, and stays at -1.
    lengths int [n] -> float [n].
    """
    return ((max_length - margin - lengths).float() / margin).clamp(-1.0, 0.0)


def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    divergence: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """Place each sequence's reward at its last unmasked token: float [n] -> float [t].

    With `divergence`, float [t] from `kl_estimate`, every unmasked token also gets -beta k_t. The
    reward of a sequence without an unmasked token is dropped.
    """
    positions = torch.arange(len(mask), device=mask.device)
    last = torch.full((len(rewards),), -1, device=mask.device).scatter_reduce_(
        0, sequence_ids[mask], positions[mask], "amax"
    )
    result = rewards.new_zeros(len(mask))
    result[last[last >= 0]] = rewards[last >= 0]
    if divergence is None:
        return result
    return result - beta * torch.where(mask, divergence.detach(), torch.zeros_like(divergence))


@dataclass(frozen=True)
class Moments:
    """Count (or sum of weights), mean and sample deviation (n - 1) of a batch; 0 without values."""

    count: float
    mean: float
    std: float


def shares(values: Tensor, episode_ids: Tensor) -> Tensor:
    """Compute 1 / (number of traces) of each trajectory's episode, in the dtype of `values`."""
    return 1 / torch.bincount(episode_ids)[episode_ids].to(values.dtype)


def moments(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] = lambda partial: partial,
) -> Moments:
    """Compute the moments of the unmasked values of all ranks, in float64. Every rank calls it.

    The variance takes a second pass, because the difference of two large sums would lose a small
    one. `reduce` sums a tensor over ranks. weights: float, of each value; 1 by default.
    """
    values = values.double()
    weights = torch.ones_like(values) if weights is None else weights.double()
    if mask is not None:
        values, weights = values[mask], weights[mask]
    count, total = reduce(torch.stack([weights.sum(), (weights * values).sum()])).tolist()
    mean = total / count if count else 0.0
    variance = float(reduce((weights * (values - mean) ** 2).sum())) / max(count - 1, 1)
    std = variance**0.5
    # A smaller deviation is the rounding error of the mean of equal values.
    return Moments(count, mean, std if std > 1e-12 * abs(mean) else 0.0)


def whiten(values: Tensor, stats: Moments, *, mask: Tensor | None = None) -> Tensor:
    """Normalize to (x - mean) / (std + 1e-8); 0 where masked, or where all values are equal."""
    result = (values - stats.mean) / (stats.std + 1e-8) if stats.std else torch.zeros_like(values)
    return result if mask is None else torch.where(mask, result, torch.zeros_like(result))


def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    episode_ids: Tensor | None = None,
    divide_by_std: bool = True,
    eps: float = 1e-6,
    leave_one_out: bool = False,
    batch_mean: Moments | None = None,
    batch_std: Moments | None = None,
) -> Tensor:
    """Compute advantages relative to groups, from rewards float [n] and ids int [n]: float [n].

    GRPO: (r_i - mean_g) / (std_g + eps) (arXiv 2402.03300, section 4.1.2). Dr. GRPO, without
    `divide_by_std`: r_i - mean_g (arXiv 2503.20783, section 3.2). The deviation is the sample's
    (n - 1). A group of one, or of equal rewards, has advantage 0.

    Args:
        episode_ids: int64 [n], from 0, shared by traces; by default each is an episode of its own
        leave_one_out: take the mean of the other episodes as baseline
        batch_mean: `moments` of the batch, for its mean; a group of equal rewards then has a signal
        batch_std: the same, for its deviation (with the group's mean in arXiv 2508.08221)
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    weights = torch.ones_like(rewards) if episode_ids is None else shares(rewards, episode_ids)
    count = rewards.new_zeros(count_ids(group)).index_add(0, group, weights)
    advantages = centred = _centred(rewards, weights, group, count)
    size = count[group]
    if batch_mean is not None:
        advantages = rewards - batch_mean.mean
        size = torch.full_like(rewards, batch_mean.count)
    if leave_one_out:
        # mean - mean of the others = (mean of the episode - mean) / (episodes - 1)
        advantages = advantages + episode_mean(advantages, episode_ids) / (size - 1).clamp(min=1)
    if not divide_by_std:
        return advantages
    if batch_std is not None:
        return advantages / (batch_std.std + eps) if batch_std.std else torch.zeros_like(advantages)
    squares = torch.zeros_like(count).index_add_(0, group, weights * centred**2)
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    return advantages / (deviation[group] + eps)


def episode_mean(values: Tensor, episode_ids: Tensor | None) -> Tensor:
    """Average the values of each trajectory's episode: float [n] -> float [n]."""
    if episode_ids is None:
        return values
    return group_mean(values, torch.ones_like(values, dtype=torch.bool), episode_ids)


def _centred(rewards: Tensor, weights: Tensor, group: Tensor, count: Tensor) -> Tensor:
    """Subtract the mean of each group, exactly 0 where a group's rewards are equal: float [n].

    Equal rewards can differ from their rounded mean by an ulp. Division by a tiny deviation would
    turn that into a signal. weights: float [n], the share of each trajectory in its episode;
    group: int64 [n], from 0; count: float [groups], the episodes of each group.
    """
    zeros = torch.zeros_like(count)
    mean = zeros.index_add(0, group, weights * rewards) / count
    lowest = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    return torch.where((highest > lowest)[group], rewards - mean[group], 0.0)


def rloo(rewards: Tensor, group_ids: Tensor, *, episode_ids: Tensor | None = None) -> Tensor:
    """Compute REINFORCE leave-one-out advantages: r_i - mean of the rest of its group.

    Source: arXiv 2402.14740. The advantage is 0 in a group of one. `episode_ids` as in `grpo`.
    """
    return grpo(
        rewards, group_ids, episode_ids=episode_ids, divide_by_std=False, leave_one_out=True
    )


def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float = 1.0,
    turn_ids: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] = lambda partial: partial,
) -> Tensor:
    """Compute REINFORCE++ advantages from token rewards float [t]: float [t], 0 where masked.

    Token returns G_t = r_t + gamma G_{t+1}, whitened over the unmasked tokens of all ranks
    (arXiv 2501.03262v9, eq. 4 and 5). The rewards come from `token_rewards`, with the KL term.
    turn_ids: as in `gae`.
    """
    returns, ids = torch.zeros_like(rewards), sequence_ids[mask]
    discount = torch.full_like(rewards[mask], gamma)
    if turn_ids is not None:
        discount[~ends(turn_ids[mask])] = 1.0
    returns[mask] = discounted_sum(rewards[mask], ids, discount)
    return whiten(returns, moments(returns, mask, reduce=reduce), mask=mask)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap: Tensor | None = None,
    turn_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates of ragged sequences: advantages, returns, float [t].

    A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, returns = A + V
    (arXiv 1506.02438; as in PPO, arXiv 1707.06347, eq. 11 and 12). Here t + 1 is the next
    *unmasked* token of the sequence: tokens that the policy did not sample take no time, and their
    rewards and values are ignored. Results are 0 where masked. bootstrap: float [n] by sequence id,
    V after the last token of sequences that were cut off; 0 by default.

    turn_ids: int64 [t], the turn of each token. A step of time is then a turn: gamma and lam count
    from one turn to the next, and are 1 within a turn. All its tokens have the same return.
    """
    ids, kept_values = sequence_ids[mask], values[mask]
    after = torch.zeros_like(kept_values) if bootstrap is None else bootstrap[ids]
    following = torch.where(ends(ids), after, kept_values.roll(-1))
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    step, trace = torch.full_like(kept_values, gamma), torch.full_like(kept_values, gamma * lam)
    if turn_ids is not None:
        within = ~ends(turn_ids[mask])
        step[within] = trace[within] = 1.0
    delta = rewards[mask] + step * following - kept_values
    advantages[mask] = discounted_sum(delta, ids, trace)
    returns[mask] = advantages[mask] + kept_values
    return advantages, returns


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a batch, in the order of their tokens."""

    of_token: Tensor  # int64 [t], the turn of each sampled token; that before it for others, or 0
    sequence: Tensor  # int64 [k], the sequence of each turn
    number: Tensor  # int64 [k], from 0 within the sequence


def find_turns(sampled: Tensor, sequence_ids: Tensor) -> Turns:
    """Find the turns of sequences. sampled: bool [t]; sequence_ids: int64 [t]."""
    goes_on = torch.zeros_like(sampled)
    goes_on[1:] = sampled[:-1] & (sequence_ids[1:] == sequence_ids[:-1])
    starts = sampled & ~goes_on
    sequence = sequence_ids[starts]
    before = torch.bincount(sequence, minlength=1).cumsum(0).roll(1)
    before[0] = 0
    number = torch.arange(len(sequence), device=sequence.device) - before[sequence]
    return Turns((starts.cumsum(0) - 1).clamp(min=0), sequence, number)


def credits(rewards: Tensor, earned: Tensor | None, turns: Turns) -> Tensor:
    """Divide the rewards of sequences, float [n], among their turns: float [k].

    earned: float [t], what a turn earned, at one of its tokens, and 0 at all others. None: the last
    turns earn everything.
    """
    result = rewards.new_zeros(len(turns.sequence))
    if earned is not None:
        result.index_add_(0, turns.of_token, earned)
    given = torch.zeros_like(rewards).index_add(0, turns.sequence, result)
    return result + torch.where(ends(turns.sequence), (rewards - given)[turns.sequence], 0.0)


def steadied(
    credits: Tensor,
    turns: Turns,
    group_ids: Tensor,
    trace_indices: Tensor,
    *,
    gamma: float,
    reduce: Callable[[Tensor], Tensor] = lambda partial: partial,
) -> Tensor:
    """Change credits so that the returns of turns vary less: float [k] -> [k].

    What came before turn j, P_j = r_1 + ... + r_{j-1}, does not depend on it. Adding c P_j to its
    return G_j thus changes no expected gradient, and its variance is least with

        c = -Cov(G_j, P_j) / Var(P_j), at most 1 and at least -1

    (control variates: Lavenberg and Welch, 1981, doi 10.1287/mnsc.27.3.322), over the turns of all
    ranks, each relative to the same turns of its group. If credits are noise and gamma is 1, c is
    1: every turn then has the whole reward as its return. The last credit brings this noise to
    earlier returns by way of gamma, which c is multiplied with: with 0, credits stay as they are.
    Arguments are as in `relative_to_turns`; `reduce` sums a tensor over ranks.
    """
    returns = discounted_sum(credits, turns.sequence, gamma)
    up_to = discounted_sum(credits.flip(0), turns.sequence.flip(0), 1.0).flip(0)
    before = up_to - credits
    ids, _ = _peers(turns, group_ids, trace_indices)
    every = torch.ones_like(ids, dtype=torch.bool)
    g, p = (x.double() - group_mean(x.double(), every, ids) for x in (returns, before))
    sums = torch.stack([(g * p).sum(), (p * p).sum(), (before.double() ** 2).sum()])
    covariance, variance, size = reduce(sums).tolist()
    if variance > 1e-12 * size:  # less is rounding
        returns = returns + gamma * min(max(-covariance / variance, -1.0), 1.0) * before
    following = torch.where(ends(turns.sequence), 0.0, returns.roll(-1))
    return returns - gamma * following


def _peers(turns: Turns, group_ids: Tensor, trace_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return an id for each turn that the same turns of its group share, and how many share it."""
    traces = torch.stack([group_ids, trace_indices])[:, turns.sequence]
    keys = torch.cat([traces, turns.number[None]])
    _, ids, counts = torch.unique(keys, dim=1, return_inverse=True, return_counts=True)
    return ids, counts[ids]


def relative_to_turns(
    credits: Tensor,
    turns: Turns,
    group_ids: Tensor,
    trace_indices: Tensor,
    *,
    gamma: float,
    relative: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Compare what turns earn from there on with the same turns of a group: float [k] -> [k].

    The return G_j = r_j + gamma G_{j+1} of turn j of a trace is compared with that of turn j in the
    other episodes of the group that came so far. A turn that no other episode reached has the
    advantage of the turn before it, and 0 if it is the first.

    Args:
        group_ids, trace_indices: int [n], the group of each sequence, and its number in an episode
        relative: (returns, ids) -> advantages relative to the returns with the same id
    """
    returns = discounted_sum(credits, turns.sequence, gamma)
    ids, counts = _peers(turns, group_ids, trace_indices)
    advantages = relative(returns, ids)
    comparable = (counts > 1) | (turns.number == 0)
    places = torch.arange(len(ids), device=ids.device)
    return advantages[torch.where(comparable, places, 0).cummax(0).values]
