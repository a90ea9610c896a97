"""Replay of trajectories, prompt by prompt, for objectives that are off-policy by construction (TBA, arXiv 2503.18929).

Searching and training are decoupled altogether: generation never waits, what it finds goes in here, and a batch is drawn whenever the
trainer wants one. Trajectories of any version may meet in a batch, so only Trajectory Balance may learn from it
(algo/trajectory_balance.py). The trainer remembers the reference log-probs of what it was given (megatron/reference.py).

Each of a batch's prompts is chosen anew, none twice:

    with probability m (`recency_probability`)   the prompt that was added to last, its newest K trajectories
    otherwise                                    any prompt, K of its trajectories with probability ~ exp(reward / temperature), or uniform

without replacement (Gumbel top-K), K being the group size. A prompt with fewer gives what it has; one with a single trajectory waits:
there is nothing to balance. It holds no two equal sequences of a prompt (the newer one stays), the newest `capacity` of each, and the
`max_prompts` prompts added to last. It can be filled again from the store (`Store.finished_groups`). Drawing depends on the seed, the
version and the content only. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from areal_lite.config import ReplayConfig
from areal_lite.controller.queue import BatchAssignment, shard
from areal_lite.trajectory import Group, Trajectory, balanced_shards


class ReplayBuffer:
    """Stands where GroupQueue does; `len` is the number of prompts that can be drawn."""

    def __init__(self, config: ReplayConfig, group_size: int, seed: int):
        self._config, self._group_size, self._seed = config, group_size, seed
        self._prompts: dict[
            str, list[Trajectory]
        ] = {}  # the one added to last is last; oldest trajectory first
        self._used: set[int] = set()  # groups that are in here and were drawn
        self._num_drawn = 0  # groups
        self.dropped_by_length: Counter[int] = Counter()  # nothing is too old here

    def __len__(self) -> int:
        return sum(len(held) > 1 for held in self._prompts.values())

    @property
    def num_trajectories(self) -> int:
        return sum(map(len, self._prompts.values()))

    def __iter__(self) -> Iterator[list[Trajectory]]:
        """What is held of each prompt."""
        return iter(self._prompts.values())

    def put(self, group: Group, used: bool = False) -> None:
        """`used`: a step has used its group already (a buffer that is filled again from `Store.finished_groups`)."""
        before = self._prompts.pop(group.prompt_id, [])
        distinct: dict[bytes, Trajectory] = {}
        for trajectory in reversed([*before, *group.trajectories]):  # newest first
            distinct.setdefault(trajectory.tokens.tobytes(), trajectory)
        after = self._prompts[group.prompt_id] = list(distinct.values())[: self._config.capacity][
            ::-1
        ]
        if used:
            self._used.add(group.group_id)
        self._forget(before, after)
        if len(self._prompts) > self._config.max_prompts:
            self._forget(self._prompts.pop(next(iter(self._prompts))), [])

    def _forget(self, before: list[Trajectory], after: list[Trajectory]) -> None:
        self._used -= {t.group_id for t in before} - {t.group_id for t in after}

    def drop_overdue(self, version: int) -> list[Group]:
        """None: there is no bound on staleness."""
        return []

    def take(self, count: int, version: int, num_shards: int) -> BatchAssignment | None:
        """`count` groups for a trainer at `version`, dealt to `num_shards`; None while there are fewer prompts.

        Raises ValueError when they cannot be dealt equally.
        """
        if len(self) < count:
            return None
        rng = np.random.default_rng([self._seed, version])
        drawn = [
            self._members(prompt_id, recent, rng) for prompt_id, recent in self._choose(count, rng)
        ]
        group_ids = sorted({t.group_id for members in drawn for t in members} - self._used)
        groups = [
            self._group(number, members)
            for number, members in enumerate(drawn, start=self._num_drawn)
        ]
        shards = [shard(dealt) for dealt in balanced_shards(groups, num_shards)]
        self._used.update(group_ids)
        self._num_drawn += count
        return BatchAssignment(groups, shards, 0, group_ids)

    def _choose(self, count: int, rng: np.random.Generator) -> list[tuple[str, bool]]:
        """`count` prompts, and whether each was chosen for being recent."""
        newest = [prompt_id for prompt_id, held in reversed(self._prompts.items()) if len(held) > 1]
        others = iter(rng.permutation(len(newest)).tolist())
        chosen: dict[str, bool] = {}
        for recent in rng.random(count) < self._config.recency_probability:
            candidates = iter(newest) if recent else (newest[i] for i in others)
            chosen[next(prompt_id for prompt_id in candidates if prompt_id not in chosen)] = bool(
                recent
            )
        return list(chosen.items())

    def _members(self, prompt_id: str, recent: bool, rng: np.random.Generator) -> list[Trajectory]:
        held = self._prompts[prompt_id]
        if recent:
            return held[-self._group_size :]
        rewards = np.array([t.reward for t in held], np.float64)
        scores = (
            rewards / self._config.temperature
            if self._config.by == "reward"
            else np.zeros(len(held))
        )
        best = np.argsort(-(scores + rng.gumbel(size=len(held))))[: self._group_size]
        return [held[i] for i in sorted(best.tolist())]

    def _group(self, group_id: int, members: list[Trajectory]) -> Group:
        """A draw is a group of its own: its members may come from several groups."""
        renamed = [
            replace(t, group_id=group_id, sample_index=sample_index)
            for sample_index, t in enumerate(members)
        ]
        return Group(group_id, members[0].prompt_id, len(members), renamed)
