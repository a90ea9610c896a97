"""The data that flows: Segment, Trajectory, Group, TrainBatch, and what must always hold of them.

Invariants of a trajectory (checked by `Trajectory.check` wherever one enters the system, L = number of tokens):

* `tokens`, `loss_mask`, `behavior_logprobs`, `versions` have length L;
* `loss_mask` is 1 exactly on the tokens that the policy sampled. Prompt and environment tokens have mask 0, log-prob 0.0, version -1;
* a sampled token's version is >= 0 and versions never decrease along the sequence: weights only move forward;
* a sampled token's log-prob is <= 0 or not finite. A token whose log-prob is not finite keeps its place but leaves the loss and its
  denominator (`TrainBatch.loss_mask` is 0 there) and is counted;
* the first token is never sampled: nothing precedes it that could have predicted it.

Token ids come from the server and go to the trainer as they are: nothing here ever sees text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

FINISH_REASONS = ("stop", "length", "abort")
# One token may come back with a log-prob a rounding error above zero.
_LOGPROB_SLACK = 1e-4


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a trajectory, all sampled from the weights of one version."""

    version: int
    start: int
    end: int


@dataclass(slots=True)
class Trajectory:
    """One sampled sequence: a prompt and what followed it.

    tokens int32 [L] · loss_mask bool [L] · behavior_logprobs float32 [L] (nats, of the distribution sampled from) · versions int32 [L].
    `started_at` and `finished_at` are wall-clock seconds; `requests` counts the HTTP requests that it took (more than one after an abort).
    `kv_version`: its KV cache holds nothing of an older version than this; -1 where that is not known. It may be older than all of
    `versions`: a request in a server's queue during a push in place begins with a prefix that the old weights have cached.
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
    requests: int = 1
    kv_version: int = -1

    def check(self) -> Trajectory:
        """Return self if every invariant holds. Raises ValueError that names the trajectory and the broken rule."""
        where = f"trajectory {self.group_id}/{self.sample_index} (prompt {self.prompt_id})"
        length = len(self.tokens)
        arrays = {
            "loss_mask": self.loss_mask,
            "behavior_logprobs": self.behavior_logprobs,
            "versions": self.versions,
        }
        for name, array in arrays.items():
            if len(array) != length:
                raise ValueError(f"{where}: {length} tokens but {len(array)} {name}")
        if length == 0:
            raise ValueError(f"{where}: no tokens")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(
                f"{where}: finish reason {self.finish_reason!r} is none of {', '.join(FINISH_REASONS)}"
            )
        mask, some = (
            self.loss_mask.astype(bool, copy=False),
            np.count_nonzero,
        )  # several times as fast as any() on so few numbers
        given = ~mask
        if mask[0]:
            raise ValueError(
                f"{where}: the first token is marked as sampled, but nothing precedes it"
            )
        if some(self.versions[given] != -1) or some(self.behavior_logprobs[given]):
            raise ValueError(
                f"{where}: a token that was not sampled carries a version or a log-prob"
            )
        sampled = self.versions[mask]
        if some(sampled < 0):
            raise ValueError(f"{where}: a sampled token has no version")
        if some(sampled[1:] < sampled[:-1]):
            raise ValueError(
                f"{where}: versions go backwards: {[(s.version, s.start, s.end) for s in self.segments]}"
            )
        if some((self.behavior_logprobs > _LOGPROB_SLACK) & (self.behavior_logprobs < np.inf)):
            raise ValueError(f"{where}: a log-prob above zero: {np.nanmax(self.behavior_logprobs)}")
        return self

    @property
    def segments(self) -> list[Segment]:
        """Runs of sampled tokens of equal version, in order; environment tokens between two runs end a segment."""
        versions = self.versions
        edges = (np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist()
        starts, ends = [0, *edges], [*edges, len(versions)]
        return [Segment(int(versions[s]), s, e) for s, e in zip(starts, ends) if versions[s] >= 0]

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


@dataclass(slots=True)
class Group:
    """The trajectories of one prompt, tied by `group_id`. `size` is how many were asked for; fewer may have survived.

    `prompt_index` is the prompt's place in the data set, -1 when it is not to be asked again."""

    group_id: int
    prompt_id: str
    size: int
    trajectories: list[Trajectory] = field(default_factory=list)
    prompt_index: int = -1

    @property
    def oldest_version(self) -> int:
        """Lowest version of any sampled token; -1 when nothing was sampled."""
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


@dataclass(slots=True)
class TrainBatch:
    """Trajectories laid end to end: the trainer's input.

    Per token (T in all): tokens int32, loss_mask bool, behavior_logprobs float32, versions int32.
    Per sequence (n in all): rewards float32, group_ids int64, sample_indices int32, truncated bool (finish reason `length`),
    kv_versions int32 (as Trajectory.kv_version).
    cu_seqlens int64 [n + 1]: sequence i owns tokens [cu_seqlens[i], cu_seqlens[i + 1]).
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
        """Lay trajectories end to end. Tokens with a non-finite log-prob lose their mask here (and get log-prob 0)."""
        if not trajectories:
            raise ValueError("a batch needs at least one trajectory")
        lengths = [len(t.tokens) for t in trajectories]
        logprobs = np.concatenate([t.behavior_logprobs for t in trajectories]).astype(np.float32)
        finite = np.isfinite(logprobs)
        return cls(
            tokens=np.concatenate([t.tokens for t in trajectories]).astype(np.int32),
            loss_mask=np.concatenate([t.loss_mask for t in trajectories]).astype(bool) & finite,
            behavior_logprobs=np.where(finite, logprobs, np.float32(0)),
            versions=np.concatenate([t.versions for t in trajectories]).astype(np.int32),
            rewards=np.array(
                [np.nan if t.reward is None else t.reward for t in trajectories], np.float32
            ),
            group_ids=np.array([t.group_id for t in trajectories], np.int64),
            sample_indices=np.array([t.sample_index for t in trajectories], np.int32),
            truncated=np.array([t.finish_reason == "length" for t in trajectories], bool),
            kv_versions=np.array([t.kv_version for t in trajectories], np.int32),
            cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.rewards)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.cu_seqlens)

    @property
    def sequence_ids(self) -> np.ndarray:
        """int64 [T]: the index of each token's sequence."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    def token_indices(self, sequences: np.ndarray) -> np.ndarray:
        """int64: where the tokens of the sequences stand, in the order of `sequences`."""
        lengths = self.lengths[sequences]
        ends = np.cumsum(lengths)
        return np.arange(ends[-1] if len(ends) else 0) + np.repeat(
            self.cu_seqlens[sequences] - ends + lengths, lengths
        )

    def minibatches(self, num: int) -> list[np.ndarray]:
        """Sequence indices of `num` minibatches: whole groups, in the order in which they first appear, equally many each."""
        _, first, inverse = np.unique(self.group_ids, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))[inverse]
        groups = len(first)
        if groups % num:
            raise ValueError(f"{groups} groups cannot be split into {num} minibatches")
        return [np.flatnonzero(order // (groups // num) == m) for m in range(num)]

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The batch of the sequences `indices`, in that order."""
        indices = np.asarray(indices, np.int64)
        where, lengths = self.token_indices(indices), self.lengths[indices]
        return TrainBatch(
            **{name: getattr(self, name)[where] for name in _TOKEN_ARRAYS},
            **{name: getattr(self, name)[indices] for name in _SEQUENCE_ARRAYS},
            cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        )

    def to_frames(self) -> list[bytes | memoryview]:
        """For a socket: a msgpack header (names and lengths), then one raw little-endian buffer per array. No pickle."""
        arrays = {
            name: getattr(self, name) for name in (*_TOKEN_ARRAYS, *_SEQUENCE_ARRAYS, "cu_seqlens")
        }
        header = msgspec.msgpack.encode([[name, len(array)] for name, array in arrays.items()])
        return [
            header,
            *(
                memoryview(np.ascontiguousarray(a)).cast("B") if len(a) else b""
                for a in arrays.values()
            ),
        ]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes | memoryview]) -> TrainBatch:
        """The inverse of `to_frames`. Raises ValueError for frames that are not a batch."""
        dtypes = {**_TOKEN_ARRAYS, **_SEQUENCE_ARRAYS, "cu_seqlens": np.int64}
        header = msgspec.msgpack.decode(frames[0], type=list[tuple[str, int]])
        if [name for name, _ in header] != list(dtypes) or len(frames) != len(dtypes) + 1:
            raise ValueError(f"not a batch: {header} in {len(frames)} frames")
        arrays = {}
        for (name, length), frame in zip(header, frames[1:]):
            array = np.frombuffer(frame, dtypes[name])
            if len(array) != length:
                raise ValueError(
                    f"not a batch: {name} has {len(array)} elements, its header says {length}"
                )
            arrays[name] = array.copy()  # a buffer of the socket is read-only and may be reused
        return cls(**arrays)


def balanced_shards(groups: Sequence[Group], num_shards: int) -> list[list[Group]]:
    """Deal whole groups to data-parallel ranks: equally many groups each, tokens as equal as a greedy longest-first deal gets them.

    Raises ValueError when the groups cannot be dealt equally.
    """
    if len(groups) % num_shards:
        raise ValueError(
            f"{len(groups)} groups cannot be dealt equally to {num_shards} data-parallel ranks"
        )
    capacity = len(groups) // num_shards
    weight = {g.group_id: sum(len(t.tokens) for t in g.trajectories) for g in groups}
    shards: list[list[Group]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for group in sorted(groups, key=lambda g: (-weight[g.group_id], g.group_id)):
        target = min(
            (i for i in range(num_shards) if len(shards[i]) < capacity), key=lambda i: (load[i], i)
        )
        shards[target].append(group)
        load[target] += weight[group.group_id]
    return [sorted(shard, key=lambda g: g.group_id) for shard in shards]
