"""Credit for turns: the reward of an episode divided among the turns in which it was earned.

A turn is a run of tokens that the policy sampled, between the prompt and tokens of the environment.
A workflow may say what each turn earned. The last turn gets what is then left of the reward, so the
credits r_1, …, r_K of a sequence add up to its reward.

t tokens in n sequences have k turns. The tokens of a sequence stand side by side, in order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lite.algo.sequences import discounted_sum, ends


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
    traces = torch.stack([group_ids, trace_indices])[:, turns.sequence]
    keys = torch.cat([traces, turns.number[None]])
    _, ids, counts = torch.unique(keys, dim=1, return_inverse=True, return_counts=True)
    advantages = relative(returns, ids)
    comparable = (counts[ids] > 1) | (turns.number == 0)
    places = torch.arange(len(ids), device=ids.device)
    return advantages[torch.where(comparable, places, 0).cummax(0).values]
