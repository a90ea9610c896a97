"""The queue of finished groups between dispatcher and trainer, oldest first.

* Oldest means admitted first (lowest `group_id`): a slow group is next as soon as it has finished,
  and quick ones do not overtake it.
* Admission keeps groups within `max_staleness` if they are used in order (`admission.py`). A slow
  group may still exceed it, so the hard bound is applied here, when the trainer takes a batch. At
  trainer version v a token is overdue if its version is below v - max_staleness.
* `buffer.overdue=mask`: an overdue token leaves the loss and its denominator; the rest of its
  sequence stays. `buffer.overdue=drop`: a group with an overdue token leaves the queue, and its
  prompt is drawn again. Dropped groups are counted by length, because long ones tend to be late.

No clock and no I/O here.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_lite.trajectory import Group, TrainBatch

# In versions: more steps than any run has.
_NO_BOUND = 2**30


@dataclass(slots=True, kw_only=True)
class BatchAssignment:
    """The batch of one training step.

    Args:
        groups: its groups.
        shards: one TrainBatch per data-parallel rank.
        masked_tokens: number of overdue tokens that were masked.
        group_ids: the groups that the step uses up.
    """

    groups: list[Group]
    shards: list[TrainBatch]
    masked_tokens: int
    group_ids: list[int]


class GroupQueue:
    """Finished groups in the order of admission."""

    def __init__(self, max_staleness: int | None, overdue: str):
        """`max_staleness` is in versions, None for no bound. `overdue` is `mask` or `drop`."""
        if overdue not in ("mask", "drop"):
            raise ValueError(f"buffer.overdue is {overdue!r}: use mask or drop")
        self._max_staleness = _NO_BOUND if max_staleness is None else max_staleness
        self._overdue = overdue
        self._groups: list[Group] = []
        # longest completion of the group, rounded up to a power of two -> number of groups
        self.dropped_by_length: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Add a finished group."""
        assert group.trajectories, "an empty group cannot be trained on"
        bisect.insort(self._groups, group, key=lambda g: g.group_id)

    def drop_overdue(self, version: int) -> list[Group]:
        """Remove and return the groups with an overdue token; none in mode `mask`."""
        if self._overdue == "mask":
            return []
        oldest = version - self._max_staleness
        dropped = [group for group in self._groups if group.oldest_version < oldest]
        self._groups = [group for group in self._groups if group.oldest_version >= oldest]
        for group in dropped:
            longest = max(t.num_sampled for t in group.trajectories)
            self.dropped_by_length[1 << (longest - 1).bit_length()] += 1
        return dropped

    def take(self, count: int, version: int, num_shards: int) -> BatchAssignment | None:
        """Take the oldest `count` groups for a trainer at `version`; None while there are fewer.

        Call `drop_overdue` first. Raises ValueError if the shards cannot be equal.
        """
        if len(self._groups) < count:
            return None
        groups = self._groups[:count]
        shards = make_shards(groups, num_shards)
        masked = sum(_mask_overdue(shard, version - self._max_staleness) for shard in shards)
        del self._groups[:count]
        return BatchAssignment(
            groups=groups,
            shards=shards,
            masked_tokens=masked,
            group_ids=[group.group_id for group in groups],
        )


def make_shards(groups: Sequence[Group], num_shards: int) -> list[TrainBatch]:
    """Lay out one TrainBatch per data-parallel rank."""
    return [
        TrainBatch.from_trajectories([t for group in shard for t in group.trajectories])
        for shard in balanced_shards(groups, num_shards)
    ]


def balanced_shards(groups: Sequence[Group], num_shards: int) -> list[list[Group]]:
    """Distribute whole groups over data-parallel ranks, equally many to each.

    Tokens are balanced greedily: the longest group goes to the rank with the fewest tokens. Raises
    ValueError if the groups cannot be distributed equally.
    """
    if len(groups) % num_shards:
        raise ValueError(
            f"{len(groups)} groups cannot be divided equally among {num_shards} data-parallel ranks"
        )
    capacity = len(groups) // num_shards
    num_tokens = {g.group_id: sum(len(t.tokens) for t in g.trajectories) for g in groups}
    shards: list[list[Group]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for group in sorted(groups, key=lambda g: (-num_tokens[g.group_id], g.group_id)):
        open_shards = [i for i in range(num_shards) if len(shards[i]) < capacity]
        target = min(open_shards, key=lambda i: (load[i], i))
        shards[target].append(group)
        load[target] += num_tokens[group.group_id]
    return [sorted(shard, key=lambda g: g.group_id) for shard in shards]


def _mask_overdue(batch: TrainBatch, oldest: int) -> int:
    """Mask the tokens sampled before version `oldest` and return their number."""
    overdue = batch.loss_mask & (batch.versions < oldest)
    batch.loss_mask &= ~overdue
    return int(np.count_nonzero(overdue))
