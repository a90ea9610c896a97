"""The data that flows through a run: Segment, Trajectory, Group, TrainBatch.

Invariants of a trajectory of L tokens, asserted by `Trajectory.check` wherever one is created:

* `tokens`, `loss_mask`, `behavior_logprobs` and `versions` have length L.
* `loss_mask` is true exactly for the tokens that the policy sampled. Prompt and environment tokens
  have mask false, log-prob 0.0 and version -1.
* The version of a sampled token is >= 0, and versions never decrease along the sequence: weights
  only move forward.
* The log-prob of a sampled token is <= 0 or not finite. A token without a finite log-prob stays in
  the sequence, leaves the loss and its denominator (`TrainBatch.loss_mask`), and is counted.
* The first token is not sampled: nothing precedes it that could have predicted it.

Token ids go from the server to the trainer unchanged. Nothing here sees text.

Example: a prompt of two tokens, a push of version 5 after the second sampled token, one token from
the environment, and a second turn. L = 8, three segments:

    tokens      p0   p1   a    b    c    env  d    e
    loss_mask   -    -    x    x    x    -    x    x
    versions    -1   -1   4    4    5    -1   5    5
    segments              [ 4    4 ][ 5 ]     [ 5    5 ]
                Segment(4, 2, 4), Segment(5, 4, 5), Segment(5, 6, 8)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

# A server may round a log-prob of 0 to a value slightly above.
_LOGPROB_SLACK = 1e-4


class FinishReason(StrEnum):
    """The reason why generation ended, as the server reports it."""

    STOP = "stop"
    """The policy sampled a stop token."""
    LENGTH = "length"
    """The token budget was used up: the trajectory is truncated."""
    ABORT = "abort"
    """The request was aborted, for example by a push. Only parts of a trajectory have this."""


_FINISH_REASONS = frozenset(FinishReason)


class GroupState(StrEnum):
    """The life cycle of a rollout group, as the store has it.

        IN_FLIGHT ──> FINISHED ──> USED
            ├──> FILTERED  └──> DROPPED
            └──> DROPPED

    USED, FILTERED and DROPPED are final, except that a resumed run takes back USED groups whose
    step is lost. With `server.deterministic` it plays again what lost weights sampled, FILTERED
    groups too.
    """

    IN_FLIGHT = "in_flight"
    """Its trajectories are being generated."""
    FINISHED = "finished"
    """It has trajectories with rewards, and waits for the trainer."""
    USED = "used"
    """A training step has used it."""
    FILTERED = "filtered"
    """It finished, and a filter found nothing to learn in it."""
    DROPPED = "dropped"
    """Every rollout failed, it became too stale, or a resume discarded it. Its prompt is drawn
    again."""


class InterruptMode(StrEnum):
    """The effect of a push on the requests in flight (`rollout.interrupt`)."""

    IN_PLACE = "in_place"
    """Pause. Requests keep their KV cache, of the old weights, and continue with the new ones."""
    RETRACT = "retract"
    """Pause. The server discards the KV cache, and computes it again with the new weights."""
    ABORT = "abort"
    """Requests end with what they have, and are sent again as prompt plus that prefix."""
    NONE = "none"
    """Wait until no request is in flight: no trajectory has tokens of two versions."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a trajectory, all sampled from the weights of one version."""

    version: int
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence: a prompt and its continuation.

    Args:
        group_id: the group that it belongs to.
        sample_index: its number within the group.
        tokens: int32 [L].
        loss_mask: bool [L], true for sampled tokens.
        behavior_logprobs: float32 [L], nats, of the distribution that was sampled from.
        versions: int32 [L], the version of the weights that sampled each token, else -1.
        finish_reason: a FinishReason.
        reward: None until it is scored.
        started_at, finished_at: wall-clock seconds. server: name of that of its last turn, or "".
        requests: number of HTTP requests, more than one after an abort or in several turns.
        kv_version: the KV cache holds nothing of older versions than this; -1 if unknown. It can be
            older than every entry of `versions`: a request that was queued during an in-place push
            may begin with a prefix that the old weights have cached.
    """

    group_id: int
    prompt_id: str
    sample_index: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    reward: float | None = None
    started_at: float = 0.0
    finished_at: float = 0.0
    server: str = ""
    requests: int = 1
    kv_version: int = -1

    def check(self) -> Trajectory:
        """Return self. Raises ValueError that names the trajectory and the broken invariant."""
        if broken := self._broken_invariant():
            name = f"trajectory {self.group_id}/{self.sample_index} (prompt {self.prompt_id})"
            raise ValueError(f"{name}: {broken}")
        return self

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
        return None

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


@dataclass(slots=True, kw_only=True)
class Group:
    """The trajectories of one prompt, tied by `group_id`.

    `size` trajectories were asked for; failed rollouts are missing. `prompt_index` is the position
    of the prompt in the data set, or -1 if it cannot be drawn again.
    """

    group_id: int
    prompt_id: str
    size: int
    trajectories: list[Trajectory] = field(default_factory=list)
    prompt_index: int = -1

    @property
    def oldest_version(self) -> int:
        """Return the lowest version of a sampled token; -1 if nothing was sampled."""
        sampled = [t.versions[t.loss_mask.astype(bool)] for t in self.trajectories]
        sampled = [v for v in sampled if len(v)]
        return int(min(v.min() for v in sampled)) if sampled else -1


_TOKEN_ARRAYS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
}
_SEQUENCE_ARRAYS = {
    "rewards": np.float32,
    "group_ids": np.int64,
    "sample_indices": np.int32,
    "truncated": np.bool_,
    "kv_versions": np.int32,
}
_ARRAYS = {**_TOKEN_ARRAYS, **_SEQUENCE_ARRAYS, "cu_seqlens": np.int64}


@dataclass(slots=True, kw_only=True)
class TrainBatch:
    """Trajectories laid end to end: n sequences with T tokens in all.

    Args:
        tokens: int32 [T].
        loss_mask: bool [T], true where a token takes part in the loss.
        behavior_logprobs: float32 [T], finite.
        versions: int32 [T].
        rewards: float32 [n], NaN without a reward.
        group_ids: int64 [n].
        sample_indices: int32 [n].
        truncated: bool [n], true for finish reason `length`.
        kv_versions: int32 [n], as in Trajectory.
        cu_seqlens: int64 [n + 1]; sequence i owns tokens [cu_seqlens[i], cu_seqlens[i + 1]).
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    rewards: np.ndarray
    group_ids: np.ndarray
    sample_indices: np.ndarray
    truncated: np.ndarray
    kv_versions: np.ndarray
    cu_seqlens: np.ndarray

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> TrainBatch:
        """Lay trajectories end to end.

        A token whose log-prob is not finite gets mask false and log-prob 0 here.
        """
        if not trajectories:
            raise ValueError("a batch needs at least one trajectory")
        lengths = [len(t.tokens) for t in trajectories]
        rewards = [np.nan if t.reward is None else t.reward for t in trajectories]
        logprobs = np.concatenate([t.behavior_logprobs for t in trajectories]).astype(np.float32)
        finite = np.isfinite(logprobs)
        return cls(
            tokens=np.concatenate([t.tokens for t in trajectories]).astype(np.int32),
            loss_mask=np.concatenate([t.loss_mask for t in trajectories]).astype(bool) & finite,
            behavior_logprobs=np.where(finite, logprobs, np.float32(0)),
            versions=np.concatenate([t.versions for t in trajectories]).astype(np.int32),
            rewards=np.array(rewards, np.float32),
            group_ids=np.array([t.group_id for t in trajectories], np.int64),
            sample_indices=np.array([t.sample_index for t in trajectories], np.int32),
            truncated=np.array([t.finish_reason == FinishReason.LENGTH for t in trajectories]),
            kv_versions=np.array([t.kv_version for t in trajectories], np.int32),
            cu_seqlens=_cumulative(lengths),
        )

    @property
    def num_sequences(self) -> int:
        """Return n."""
        return len(self.rewards)

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sequence, int64 [n]."""
        return np.diff(self.cu_seqlens)

    @property
    def sequence_ids(self) -> np.ndarray:
        """Return the index of each token's sequence, int64 [T]."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    def token_indices(self, sequences: np.ndarray) -> np.ndarray:
        """Return the indices of the tokens of `sequences`, in the given order, int64."""
        lengths = self.lengths[sequences]
        ends = np.cumsum(lengths)
        shifts = self.cu_seqlens[sequences] - (ends - lengths)
        return np.arange(ends[-1] if len(ends) else 0) + np.repeat(shifts, lengths)

    def minibatches(self, num: int) -> list[np.ndarray]:
        """Split into `num` minibatches of equally many whole groups; return sequence indices.

        Groups keep the order in which they first appear. Raises ValueError if they cannot be split
        equally.
        """
        _, first, inverse = np.unique(self.group_ids, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))[inverse]
        groups = len(first)
        if groups % num:
            raise ValueError(f"{groups} groups cannot be split into {num} minibatches")
        return [np.flatnonzero(order // (groups // num) == m) for m in range(num)]

    def select(self, indices: Sequence[int] | np.ndarray) -> TrainBatch:
        """Return the batch of the sequences `indices`, in that order."""
        indices = np.asarray(indices, np.int64)
        token_indices = self.token_indices(indices)
        return TrainBatch(
            **{name: getattr(self, name)[token_indices] for name in _TOKEN_ARRAYS},
            **{name: getattr(self, name)[indices] for name in _SEQUENCE_ARRAYS},
            cu_seqlens=_cumulative(self.lengths[indices]),
        )

    def to_frames(self) -> list[bytes | memoryview]:
        """Encode for a socket, without pickle.

        The first frame is a msgpack header of names and lengths. Each further frame is the raw
        little-endian buffer of one array.
        """
        arrays = [getattr(self, name) for name in _ARRAYS]
        header = msgspec.msgpack.encode([[n, len(a)] for n, a in zip(_ARRAYS, arrays)])
        buffers = [np.ascontiguousarray(a).data.cast("B") if len(a) else b"" for a in arrays]
        return [header, *buffers]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes | memoryview]) -> TrainBatch:
        """Decode what `to_frames` encoded. Raises ValueError for frames that are not a batch."""
        header = msgspec.msgpack.decode(frames[0], type=list[tuple[str, int]])
        if [name for name, _ in header] != list(_ARRAYS) or len(frames) != len(_ARRAYS) + 1:
            raise ValueError(f"not a batch: {header} in {len(frames)} frames")
        arrays = {}
        for (name, length), frame in zip(header, frames[1:]):
            array = np.frombuffer(frame, _ARRAYS[name])
            if len(array) != length:
                raise ValueError(f"not a batch: {name} has {len(array)} elements, not {length}")
            # Copied because a socket's buffer is read-only and may be reused.
            arrays[name] = array.copy()
        return cls(**arrays)


def _cumulative(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return [0, l0, l0 + l1, ...], int64."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
