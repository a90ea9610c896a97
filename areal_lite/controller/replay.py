"""A replay buffer of episodes by prompt, for objectives that are off-policy by construction.

Search and training are decoupled (TBA, arXiv 2503.18929): generation never waits, everything that
it finds goes into the buffer, and a batch is drawn whenever the trainer wants one. A batch mixes
episodes of any version, so only Trajectory Balance can learn from it
(algo/trajectory_balance.py). The trainer caches reference log-probs (megatron/reference.py).

A batch has distinct prompts. Each is chosen as follows, with m = `recency_probability` and group
size K:

    with probability m   the prompt that was added to last, and its newest K episodes
    otherwise            any prompt, and K of its episodes without replacement (Gumbel top-K):
                         with probability ~ exp(reward / temperature), or uniformly

* A prompt with fewer than K episodes gives all it has. A prompt with one is not drawn: there is
  nothing to balance.
* An episode is drawn with all of its traces.
* The buffer holds distinct episodes of a prompt (the newer of two equal ones), the newest
  `capacity` of each prompt, and the `MAX_PROMPTS` prompts that were added to last.
* A draw depends only on the seed, the version and the content. The store records it, because the
  content depends on when groups finish.
* A resumed run fills the buffer again from `Store.finished_groups`. The store keeps the tokens of
  `group_ids` (`controller/controller.py`).

No clock and no I/O here.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from areal_lite.config import ReplayConfig
from areal_lite.config.sections import MAX_PROMPTS
from areal_lite.controller.buffer import BatchAssignment, make_shards
from areal_lite.trajectory import Group, Trajectory, episode_reward


class ReplayBuffer:
    """Takes the place of GroupQueue. `len` is the number of prompts that can be drawn."""

    def __init__(self, config: ReplayConfig, group_size: int, seed: int):
        self._config = config
        self._group_size = group_size
        self._seed = seed
        # The prompt that was added to last comes last. Of each, the oldest episode comes first.
        self._prompts: dict[str, list[list[Trajectory]]] = {}
        # Ids of the rollout groups that have an episode in the buffer.
        self.group_ids: set[int] = set()
        # Those that were used by a step.
        self._used: set[int] = set()
        # Always empty: nothing is too old here.
        self.dropped_by_length: Counter[int] = Counter()

    def __len__(self) -> int:
        return sum(len(episodes) > 1 for episodes in self._prompts.values())

    def __iter__(self) -> Iterator[list[list[Trajectory]]]:
        """Iterate over the episodes of each prompt."""
        return iter(self._prompts.values())

    @property
    def num_trajectories(self) -> int:
        """Return the number of trajectories in the buffer."""
        return sum(len(traces) for episodes in self._prompts.values() for traces in episodes)

    def put(self, group: Group, used: bool = False) -> None:
        """Add a finished group. `used` says that a step has used it, before a resume."""
        before = self._prompts.pop(group.prompt_id, [])
        distinct: dict[tuple[bytes, ...], list[Trajectory]] = {}
        for traces in reversed([*before, *group.episodes]):
            distinct.setdefault(tuple(t.tokens.tobytes() for t in traces), traces)
        newest = list(distinct.values())[: self._config.capacity]
        after = self._prompts[group.prompt_id] = newest[::-1]
        self.group_ids.add(group.group_id)
        if used:
            self._used.add(group.group_id)
        self._forget(before, after)
        if len(self._prompts) > MAX_PROMPTS:
            self._forget(self._prompts.pop(next(iter(self._prompts))), [])

    def _forget(self, before: list[list[Trajectory]], after: list[list[Trajectory]]) -> None:
        """Forget the groups that have left the buffer."""
        gone = {traces[0].group_id for traces in before} - {e[0].group_id for e in after}
        self.group_ids -= gone
        self._used -= gone

    def drop_overdue(self, version: int) -> list[Group]:
        """Return nothing: there is no bound on staleness."""
        return []

    def held_back(self, count: int, oldest_running: int | None) -> bool:
        """Tell that no draw waits for a group that still runs."""
        return False

    def take(
        self, count: int, version: int, num_shards: int, oldest_running: int | None = None
    ) -> BatchAssignment | None:
        """Draw `count` groups for a trainer at `version`; None while there are fewer prompts.

        Raises ValueError if the shards cannot be equal.
        """
        if len(self) < count:
            return None
        rng = np.random.default_rng([self._seed, version])
        drawn = [
            self._draw(prompt_id, recent, rng) for prompt_id, recent in self._choose(count, rng)
        ]
        group_ids = sorted(
            {traces[0].group_id for episodes in drawn for traces in episodes} - self._used
        )
        assignment = drawn_batch(drawn, version, num_shards)
        self._used.update(group_ids)
        assignment.group_ids = group_ids
        return assignment

    def _choose(self, count: int, rng: np.random.Generator) -> list[tuple[str, bool]]:
        """Choose `count` prompts, each with whether it was chosen for its recency."""
        newest = [prompt_id for prompt_id, held in reversed(self._prompts.items()) if len(held) > 1]
        others = iter(rng.permutation(len(newest)).tolist())
        chosen: dict[str, bool] = {}
        for recent in (rng.random(count) < self._config.recency_probability).tolist():
            candidates = iter(newest) if recent else (newest[i] for i in others)
            chosen[next(prompt_id for prompt_id in candidates if prompt_id not in chosen)] = recent
        return list(chosen.items())

    def _draw(
        self, prompt_id: str, recent: bool, rng: np.random.Generator
    ) -> list[list[Trajectory]]:
        """Draw up to K episodes of one prompt, oldest first."""
        held = self._prompts[prompt_id]
        if recent:
            return held[-self._group_size :]
        logits = np.array([episode_reward(traces) for traces in held], np.float64)
        best = np.argsort(-(logits + rng.gumbel(size=len(held))))[: self._group_size]
        return [held[i] for i in sorted(best.tolist())]


def drawn_batch(
    drawn: list[list[list[Trajectory]]], version: int, num_shards: int
) -> BatchAssignment:
    """Make the batch of the step at `version` from the episodes of its draws.

    The store records the draws. It uses up no groups. Raises ValueError if the shards cannot be
    equal.
    """
    groups = [
        _as_group(number, episodes)
        for number, episodes in enumerate(drawn, start=version * len(drawn))
    ]
    return BatchAssignment(
        groups=groups,
        shards=make_shards(groups, num_shards),
        masked_tokens=0,
        group_ids=[],
        draws=[[(e[0].group_id, e[0].sample_index) for e in episodes] for episodes in drawn],
    )


def _as_group(number: int, episodes: list[list[Trajectory]]) -> Group:
    """Make a group of a draw: its episodes may come from several rollout groups."""
    renamed = [
        replace(trace, group_id=number, sample_index=sample_index)
        for sample_index, traces in enumerate(episodes)
        for trace in traces
    ]
    return Group(
        group_id=number,
        prompt_id=renamed[0].prompt_id,
        size=len(episodes),
        trajectories=renamed,
    )
