"""The data that flows through a run: Segment, Trajectory, Group.

Invariants of a trajectory of L tokens, asserted by `Trajectory.check` wherever one is created:

* `tokens`, `loss_mask`, `behavior_logprobs` and `versions` have length L.
* `loss_mask` is true exactly for the tokens that the policy sampled. Prompt and environment tokens
  have mask false, log-prob 0.0 and version -1.
* The version of a sampled token is >= 0, and versions never decrease along the sequence: weights
  only move forward.
* The log-prob of a sampled token is <= 0 or not finite. A token without a finite log-prob stays in
  the sequence, leaves the loss and its denominator (`TrainBatch.loss_mask`), and is counted.
* The first token is not sampled: nothing precedes it that could have predicted it.
* If there are `routes`, every token before a sampled one has a recorded route.

Token ids go from the server to the trainer unchanged. Nothing here sees text.

Example: a prompt of two tokens, a push of version 5 after the second sampled token, one token from
the environment, and a second turn. L = 8, three segments:

    tokens      p0   p1   a    b    c    env  d    e
    loss_mask   -    -    x    x    x    -    x    x
    versions    -1   -1   4    4    5    -1   5    5
    segments              [ 4    4 ][ 5 ]     [ 5    5 ]
                Segment(4, 2, 4), Segment(5, 4, 5), Segment(5, 6, 8)
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from areal_lite.routes import DTYPES, is_recorded

# A server may round a log-prob of 0 to a value slightly above.
_LOGPROB_SLACK = 1e-4


class FinishReason(StrEnum):
    """The reason why generation ended, as the server reports it."""

    STOP = "stop"  # the policy sampled a stop token
    LENGTH = "length"  # the token budget was used up: the trajectory is truncated
    ABORT = "abort"  # the request was aborted, as by a push: only of parts of a trajectory


_FINISH_REASONS = frozenset(FinishReason)


class GroupState(StrEnum):
    """The life cycle of a rollout group, as the store has it; docs/groups.md draws it."""

    IN_FLIGHT = "in_flight"  # its trajectories are being generated
    FINISHED = "finished"  # it has trajectories with rewards, and waits for the trainer
    USED = "used"  # a training step has used it
    FILTERED = "filtered"  # it finished, and a filter found nothing to learn in it
    DROPPED = "dropped"  # every rollout failed, or a resume discarded it: its prompt comes again


class InterruptMode(StrEnum):
    """The effect of a push on the requests in flight (`rollout.interrupt`)."""

    IN_PLACE = "in_place"  # they pause, and continue with the KV cache of the old weights
    RETRACT = "retract"  # they pause, and the new weights compute their KV cache again
    ABORT = "abort"  # they end, and are sent again as prompt plus what they have
    NONE = "none"  # it waits for them: no request has tokens of two versions


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a trajectory, all sampled from the weights of one version."""

    version: int
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence of L tokens, a trace of an episode: a prompt and its continuation."""

    group_id: int
    prompt_id: str
    sample_index: int  # the number of its episode within the group
    tokens: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L], true for sampled tokens
    behavior_logprobs: np.ndarray  # float32 [L], nats, of the distribution that was sampled from
    versions: np.ndarray  # int32 [L], of the weights that sampled each token, else -1
    finish_reason: str  # a FinishReason
    trace_index: int = 0  # its own number within the episode
    reward: float | None = None  # None until it is scored
    # What each of its turns earned, if the workflow says so: a part of `reward` or of another sign.
    turn_rewards: list[float] | None = None
    started_at: float = 0.0  # wall-clock seconds
    finished_at: float = 0.0
    server: str = ""  # the name of that of its last turn
    requests: int = 1  # HTTP requests, more than one after an abort or in several turns
    # The KV cache holds nothing of older versions than this; -1 if unknown. It can be older than
    # every entry of `versions`: a request that was queued during an in-place push may begin with a
    # prefix that the old weights have cached.
    kv_version: int = -1
    # uint8 or uint16 [L, layers, top_k], the experts that computed each token (routes.py) in the
    # forward pass that sampled the token after it. The last token has none. None without
    # `algo.routing_replay`.
    routes: np.ndarray | None = None

    def check(self) -> "Trajectory":
        """Return self. Raises ValueError that names the trajectory and the broken invariant."""
        if broken := self._broken_invariant():
            raise ValueError(f"trajectory {self.name} (prompt {self.prompt_id}): {broken}")
        return self

    @property
    def name(self) -> str:
        return f"{self.group_id}/{trace_name(self.sample_index, self.trace_index)}"

    def _broken_invariant(self) -> str | None:
        length = len(self.tokens)
        for name in ("loss_mask", "behavior_logprobs", "versions"):
            if (other := len(getattr(self, name))) != length:
                return f"{length} tokens but {other} {name}"
        if length == 0:
            return "no tokens"
        if self.finish_reason not in _FINISH_REASONS:
            return f"finish reason {self.finish_reason!r} is none of {', '.join(FinishReason)}"
        # On arrays this short, count_nonzero is several times as fast as any.
        some = np.count_nonzero
        mask = self.loss_mask.astype(bool, copy=False)
        given = ~mask
        if mask[0]:
            return "the first token is marked as sampled, but nothing precedes it"
        if some(self.versions[given] != -1) or some(self.behavior_logprobs[given]):
            return "a token that was not sampled carries a version or a log-prob"
        sampled = self.versions[mask]
        if some(sampled < 0):
            return "a sampled token has no version"
        if some(sampled[1:] < sampled[:-1]):
            return f"versions go backwards: {[(s.version, s.start, s.end) for s in self.segments]}"
        if some((self.behavior_logprobs > _LOGPROB_SLACK) & (self.behavior_logprobs < np.inf)):
            return f"a log-prob above zero: {np.nanmax(self.behavior_logprobs)}"
        if self.turn_rewards is not None:
            turns = some(mask[1:] & given[:-1])  # the first token is not sampled
            if len(self.turn_rewards) != turns or not all(map(math.isfinite, self.turn_rewards)):
                return f"{turns} turns but the turn rewards {self.turn_rewards}"
        return None if self.routes is None else _broken_routes(self.routes, mask)

    @property
    def segments(self) -> list[Segment]:
        """Return the runs of sampled tokens of one version, in order.

        Environment tokens between two runs end a segment, also if the version is the same.
        """
        versions = self.versions
        edges = (np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()
        starts, ends = [0, *edges], [*edges, len(versions)]
        return [Segment(int(versions[s]), s, e) for s, e in zip(starts, ends) if versions[s] >= 0]

    @property
    def num_sampled(self) -> int:
        """Return the number of sampled tokens."""
        return int(np.count_nonzero(self.loss_mask))


def _broken_routes(routes: np.ndarray, mask: np.ndarray) -> str | None:
    if routes.ndim != 3 or len(routes) != len(mask) or routes.dtype not in DTYPES:
        return f"{len(mask)} tokens but routes of {routes.dtype}{list(routes.shape)}"
    if np.count_nonzero(mask[1:] & ~is_recorded(routes)[:-1]):
        return "a token before a sampled one has no recorded route"
    return None


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of tokens, [n] or [n, width], with which both `a` and `b` begin."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) * length // a[:length].size if len(different) else length


def trace_name(sample_index: int, trace_index: int) -> str:
    """Name a trace within its group: "3", or "3.1" for trace 1 of sample 3."""
    return f"{sample_index}.{trace_index}" if trace_index else f"{sample_index}"


def episode_reward(traces: Sequence[Trajectory]) -> float:
    """Return the mean reward of an episode's traces, which is their reward if they share one."""
    return sum(trace.reward or 0.0 for trace in traces) / len(traces)


@dataclass(slots=True, kw_only=True)
class Group:
    """The trajectories of one prompt, tied by `group_id`."""

    group_id: int
    prompt_id: str
    size: int  # episodes that were asked for; failed ones are missing
    # An episode has one or more, side by side.
    trajectories: list[Trajectory] = field(default_factory=list)
    prompt_index: int = -1  # the prompt's place in the data set; -1 if it cannot be drawn again

    @property
    def episodes(self) -> list[list[Trajectory]]:
        """Return the traces of each episode."""
        by_sample = itertools.groupby(self.trajectories, key=lambda t: t.sample_index)
        return [list(traces) for _, traces in by_sample]

    @property
    def distinct_tokens(self) -> int:
        """Count its tokens. Those with which a trace begins like the one before it do not count.

        They are about the tokens that a trainer computes (areal_lite/megatron/prefixes.py).
        """
        traces = [trace.tokens for trace in self.trajectories]
        repeated = itertools.starmap(shared_length, itertools.pairwise(traces))
        return sum(map(len, traces)) - sum(repeated)

    @property
    def rewards(self) -> list[float]:
        """Return the `episode_reward` of each episode."""
        return [episode_reward(traces) for traces in self.episodes]
