"""Finished groups on their way to the trainer: oldest first, none too old, dealt to the data-parallel ranks.

Oldest means admitted first (lowest `group_id`), so a slow prompt that has finished at last is next and is not starved by quick ones.
Admission keeps what is used in order within `max_staleness` (areal_lite/controller/admission.py); a straggler may still exceed it. The hard
bound is applied here, when the trainer at version v takes a batch: a token is overdue if its version is below v - max_staleness.

* `mask`: an overdue token leaves the loss and its denominator; the rest of its sequence stays.
* `drop`: a group with an overdue token leaves; its prompt will be handed out again. Counted by length: the long ones are the late ones.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_lite.trajectory import Group, TrainBatch, balanced_shards

_NO_BOUND = 2**30  # versions


@dataclass(slots=True)
class BatchAssignment:
    """The batch of one step: its groups, one shard per data-parallel rank, how many tokens were overdue, and which groups it uses up."""

    groups: list[Group]
    shards: list[TrainBatch]
    masked_tokens: int
    group_ids: list[int]


class GroupQueue:
    """Finished groups in order of admission."""

    def __init__(self, max_staleness: int | None, overdue: str):
        """`max_staleness=None`: nothing is overdue."""
        self._max_staleness, self._overdue = (
            _NO_BOUND if max_staleness is None else max_staleness,
            overdue,
        )
        self._groups: list[Group] = []
        self.dropped_by_length: Counter[int] = (
            Counter()
        )  # longest completion, rounded up to a power of two -> groups

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        assert group.trajectories, "an empty group cannot be trained on"
        bisect.insort(self._groups, group, key=lambda g: g.group_id)

    def drop_overdue(self, version: int) -> list[Group]:
        """Take out and return the groups that a trainer at `version` must not use; none in mode `mask`."""
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
        """The oldest `count` groups, dealt to `num_shards`; None while there are fewer. Call `drop_overdue` first.

        Raises ValueError when they cannot be dealt equally.
        """
        if len(self._groups) < count:
            return None
        groups = self._groups[:count]
        shards = [shard(dealt) for dealt in balanced_shards(groups, num_shards)]
        masked = sum(_mask_overdue(batch, version - self._max_staleness) for batch in shards)
        del self._groups[:count]
        return BatchAssignment(groups, shards, masked, [group.group_id for group in groups])


def shard(groups: Sequence[Group]) -> TrainBatch:
    """The groups of one rank, end to end."""
    return TrainBatch.from_trajectories([t for group in groups for t in group.trajectories])


def _mask_overdue(batch: TrainBatch, oldest: int) -> int:
    """Clear the loss mask of tokens sampled before version `oldest`; how many there were."""
    overdue = batch.loss_mask & (batch.versions < oldest)
    batch.loss_mask &= ~overdue
    return int(np.count_nonzero(overdue))
