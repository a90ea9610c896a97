"""Batches of trajectories as flat arrays, which travel from the controller to the trainer."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from areal_lite.routes import DTYPES, join_routes
from areal_lite.trajectory import FinishReason, Trajectory

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
    "trace_indices": np.int32,
    "truncated": np.bool_,
    "kv_versions": np.int32,
    "source_keys": np.int64,
}
_ARRAYS = {**_TOKEN_ARRAYS, **_SEQUENCE_ARRAYS, "cu_seqlens": np.int64}
# The dtypes that each array may have. A batch may lack the last two.
_DTYPES = {name: (np.dtype(dtype),) for name, dtype in _ARRAYS.items()}
_DTYPES |= {"turn_rewards": (np.dtype(np.float32),), "routes": DTYPES}


@dataclass(slots=True, kw_only=True)
class TrainBatch:
    """Trajectories laid end to end: n sequences with T tokens in all."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], true where a token takes part in the loss
    behavior_logprobs: np.ndarray  # float32 [T], finite
    versions: np.ndarray  # int32 [T]
    rewards: np.ndarray  # float32 [n], NaN without a reward
    group_ids: np.ndarray  # int64 [n]
    sample_indices: np.ndarray  # int32 [n]
    trace_indices: np.ndarray  # int32 [n]
    truncated: np.ndarray  # bool [n], true for finish reason `length`
    kv_versions: np.ndarray  # int32 [n], as in Trajectory
    source_keys: np.ndarray  # int64 [n], the `source_key` of each trajectory's data source
    cu_seqlens: np.ndarray  # int64 [n + 1]; sequence i owns [cu_seqlens[i], cu_seqlens[i + 1])
    # float32 [T], what a turn earned, at its last token, else 0. None if no workflow says so.
    turn_rewards: np.ndarray | None = None
    routes: np.ndarray | None = None  # [T, layers, top_k], as in Trajectory; None without any

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], with_routes: bool = True
    ) -> "TrainBatch":
        """Lay trajectories end to end, their routes only if asked to.

        A token whose log-prob is not finite gets mask false and log-prob 0 here.
        """
        lengths = [len(t.tokens) for t in trajectories]
        rewards = [np.nan if t.reward is None else t.reward for t in trajectories]
        arrays = {
            name: np.concatenate([getattr(t, name) for t in trajectories]).astype(dtype)
            for name, dtype in _TOKEN_ARRAYS.items()
        }
        finite = np.isfinite(arrays["behavior_logprobs"])
        arrays["loss_mask"] &= finite
        arrays["behavior_logprobs"][~finite] = 0
        return cls(
            **arrays,
            rewards=np.array(rewards, np.float32),
            group_ids=np.array([t.group_id for t in trajectories], np.int64),
            sample_indices=np.array([t.sample_index for t in trajectories], np.int32),
            trace_indices=np.array([t.trace_index for t in trajectories], np.int32),
            truncated=np.array([t.finish_reason == FinishReason.LENGTH for t in trajectories]),
            kv_versions=np.array([t.kv_version for t in trajectories], np.int32),
            source_keys=np.array([source_key(t.prompt_id) for t in trajectories], np.int64),
            cu_seqlens=np.cumsum([0, *lengths]),
            turn_rewards=_turn_rewards(trajectories),
            routes=join_routes([t.routes for t in trajectories], lengths) if with_routes else None,
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

    @property
    def sampled(self) -> np.ndarray:
        """Return which tokens the policy sampled, bool [T]."""
        return self.versions >= 0

    @property
    def episode_ids(self) -> np.ndarray:
        """Return the index of each sequence's episode, int64 [n]: of one group and sample index."""
        pairs = np.stack([self.group_ids, self.sample_indices])
        return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)

    def token_indices(self, sequences: np.ndarray) -> np.ndarray:
        """Return the indices of the tokens of `sequences`, in the given order, int64."""
        lengths = self.lengths[sequences]
        ends = np.cumsum(lengths)
        shifts = self.cu_seqlens[sequences] - (ends - lengths)
        return np.arange(ends[-1] if len(ends) else 0) + np.repeat(shifts, lengths)

    def minibatches(self, num: int) -> list[np.ndarray]:
        """Split into `num` minibatches of equally many whole groups; return sequence indices.

        Groups keep their order. Raises ValueError if they cannot be split equally.
        """
        _, first, inverse = np.unique(self.group_ids, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))[inverse]
        groups = len(first)
        if groups % num:
            raise ValueError(f"{groups} groups cannot be split into {num} minibatches")
        return [np.flatnonzero(order // (groups // num) == m) for m in range(num)]

    def select(self, indices: Sequence[int] | np.ndarray) -> "TrainBatch":
        """Return the batch of the sequences `indices`, in that order."""
        indices = np.asarray(indices, np.int64)
        token_indices = self.token_indices(indices)
        return TrainBatch(
            **{name: getattr(self, name)[token_indices] for name in _TOKEN_ARRAYS},
            **{name: getattr(self, name)[indices] for name in _SEQUENCE_ARRAYS},
            cu_seqlens=np.cumsum([0, *self.lengths[indices]]),
            turn_rewards=None if self.turn_rewards is None else self.turn_rewards[token_indices],
            routes=None if self.routes is None else self.routes[token_indices],
        )

    def to_frames(self) -> list[bytes | memoryview]:
        """Encode for a socket, without pickle.

        The first frame is a msgpack header of names, dtypes and shapes. Each further frame is the
        raw little-endian buffer of one array.
        """
        named = {name: a for name in _DTYPES if (a := getattr(self, name)) is not None}
        header = msgspec.msgpack.encode([[n, a.dtype.name, a.shape] for n, a in named.items()])
        arrays = named.values()
        buffers = [np.ascontiguousarray(a).data.cast("B") if a.size else b"" for a in arrays]
        return [header, *buffers]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes | memoryview]) -> "TrainBatch":
        """Decode the frames of `to_frames`. Raises ValueError for frames of something else."""
        header = msgspec.msgpack.decode(frames[0], type=list[tuple[str, str, list[int]]])
        names = [name for name, *_ in header]
        known = [name for name in _DTYPES if name in _ARRAYS or name in names]
        if names != known or len(frames) != len(header) + 1:
            raise ValueError(f"not a batch: {header} in {len(frames)} frames")
        arrays = {}
        for (name, dtype, shape), frame in zip(header, frames[1:]):
            if dtype not in [known.name for known in _DTYPES[name]]:
                raise ValueError(f"not a batch: {name} of {dtype}")
            array = np.frombuffer(frame, dtype)
            if array.size != math.prod(shape):
                raise ValueError(f"not a batch: {name} has {array.size} elements, not {shape}")
            # Copied because a socket's buffer is read-only and may be reused.
            arrays[name] = array.reshape(shape).copy()
        return cls(**arrays)


def _turn_rewards(trajectories: Sequence[Trajectory]) -> np.ndarray | None:
    """Place what turns earned at their last tokens: float32 [T]; None if no trajectory says so."""
    if all(t.turn_rewards is None for t in trajectories):
        return None
    placed = []
    for t in trajectories:
        placed.append(np.zeros(len(t.tokens), np.float32))
        if t.turn_rewards is not None:
            last = t.loss_mask & ~np.append(t.loss_mask[1:], False)
            placed[-1][last] = t.turn_rewards
    return np.concatenate(placed)


def source_key(prompt_id: str) -> int:
    """Return a number for the part of `prompt_id` before its first slash: the source's name."""
    return zlib.crc32(prompt_id.partition("/")[0].encode())


def save_batch(batch: TrainBatch, path: Path) -> None:
    """Write `batch` to the file `path`; `load_batch` reads it."""
    frames = [bytes(frame) for frame in batch.to_frames()]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.msgpack.encode(frames))


def load_batch(path: str | Path) -> TrainBatch:
    """Read a batch that `save_batch` wrote. Raises ValueError for anything else."""
    return TrainBatch.from_frames(msgspec.msgpack.decode(Path(path).read_bytes(), type=list[bytes]))
