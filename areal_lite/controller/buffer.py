"""The buffer between generation and training: admission, queue and replay. No clock, no I/O.

**Admission** (`AdmissionGate`): no group starts that would be too stale when it is used. With B
groups per training step, the servers' version v and the bound eta = `max_staleness`, a group may
start while

    accepted + running < (eta + v + 1) * B            (AReaL, arXiv 2505.24298, eq. 3)

`running` groups are being generated. `accepted` groups have finished since the start of the run;
they wait for the trainer or were used by it. v is the trainer's step at the last push, so that eta
is in training steps. With `sync.every` = N the trainer is up to N - 1 steps ahead of v, and these
steps need the batches v to v + N - 1: eta must be at least N - 1.

Invariants, asserted in tests/unit/controller/test_admission.py:

* submitted = running + accepted + rejected: a group that is filtered or fails is rejected, and
  returns its capacity to the next prompt. Otherwise admission would stop one day.
* The n-th group (n from 0) is used at step floor(n / B) if groups are used in order. It was
  admitted at a version v with n + 1 <= (eta + v + 1) * B, so floor(n / B) - v <= eta, and its
  tokens are of version v or newer. A group that younger groups overtake can exceed eta, hence the
  hard bound at consumption.

With eta = 0 only the groups of the coming step may start: synchronous training. docs/concepts.md
has an example.

**Freshness** (`buffer.freshness=auto`). Where the trainer is the slower side, tokens would always
be as stale as eta allows, for nothing. So admission runs ahead by G groups only, as many as keep
the trainer from waiting. During step s, groups start while also

    accepted + running < (s + 1) * B + G,     0 <= G <= eta * B

At the end of the next step G groups are not used yet, of which r still run. The trainer does not
wait if the other G - r are a batch, so G must be B + r. (With a rate of B groups per step, r is the
rate times the latency that the step does not hide: Little's law.) r is learned. A larger one counts
at once, and a smaller one by degrees, because a wait costs more than a step of staleness; after a
wait it does not count, because groups caught up meanwhile. If the servers are the slower side, G
grows by what was missing until eta decides. G is B at first, and eta * B if eta < 1.

This limit only lowers the first one, so no bound changes. The present batch is always within it, so
the trainer waits for groups that were admitted. With a window, G is eta * B: a batch may wait for
one old group although enough have finished, and would wait less if all had started earlier.

A run that resumes after s steps has used s * B groups. These and the finished groups that wait
count as accepted again (`recover`); groups that were in flight are lost and do not.

**The queue** (`GroupQueue`) holds finished groups. The group that was admitted first (lowest
`group_id`) comes first: a slow group is next as soon as it has finished. While it runs, younger
groups pass it, so it may exceed `max_staleness`. The hard bound is therefore applied when the
trainer takes a batch. At step s a token is overdue if its version is below s - max_staleness.

* An overdue token leaves the loss and its denominator; the rest of its sequence stays.
* `buffer.window` = W: at most W groups pass a group that still runs. Then the batch waits for it.
  No token is ever overdue, so nothing is masked, and long groups are used as often as short ones.

The bound with a window. Let group g start at version v. Then

    accepted + running <= (eta + v + 1) * B - 1      without g

and every older group is among these. g is used at step s, after s * B other groups. Of these, at
most the above are older than g. At most W are younger: none is taken once g has finished, as the
oldest finished groups are taken first, and at most W while g runs. Hence

    s * B <= (eta + v + 1) * B - 1 + W,     so     s - v <= eta + ceil(W / B).

No token of g is older than v. Admission therefore gets eta = max_staleness - ceil(W / B), which is
`TrainConfig.max_lead`, and `max_staleness` holds for every token. A run that resumes has no group
that still runs, so the same count holds. tests/unit/controller/test_window.py checks the bound.

**Replay** (`ReplayBuffer`) decouples search from training (TBA, arXiv 2503.18929): a batch mixes
episodes of any version, so only Trajectory Balance can learn from it. It has distinct prompts, each
chosen as docs/groups.md (Replay) says: the prompt that was added to last, with its newest episodes,
or any prompt, with episodes that are drawn without replacement (Gumbel top-K).

* A prompt with fewer episodes than a group gives all it has. A prompt with one is not drawn: there
  is nothing to balance.
* The buffer holds distinct episodes of a prompt (the newer of two equal ones), the newest
  `capacity` of each prompt, and the `MAX_PROMPTS` prompts that were added to last.
* A draw depends only on the seed, the version and the content. The store records it, because the
  content depends on when groups finish.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_lite.config import ReplayConfig
from areal_lite.config.sections import MAX_PROMPTS
from areal_lite.routes import join_routes
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Group, Trajectory, episode_reward

_FORGETS = 16  # steps in which two thirds of an excess in `late` are forgotten


@dataclass(slots=True, kw_only=True)
class AdmissionGate:
    """Counts groups and decides whether another one may start."""

    max_staleness: int | None  # the bound eta in steps; None for replay: generation never waits
    batch_groups: int  # per training step, B
    fresh: bool = False  # whether groups start as late as the trainer allows
    steps: int | None = None  # of the run: no group starts that no step would use. None: no end
    version: int = 0  # the servers'
    step: int = 0  # completed training steps
    running: int = 0
    accepted: int = 0
    rejected: int = 0
    late: float = 0.0  # groups that still run when a step ends: r, learned
    awaited: bool = True  # whether the trainer has to wait for the batch of this step

    @property
    def lead(self) -> int | None:
        """Return by how many groups admission may run ahead of the batch of this step: G."""
        if self.max_staleness is None:
            return None
        most = self.max_staleness * self.batch_groups
        if not self.fresh:
            return most
        # The last fraction of a forgotten r counts for no group.
        return min(self.batch_groups + math.ceil(self.late - 1 / _FORGETS), most)

    @property
    def capacity(self) -> float:
        """Return how many groups may start now."""
        lead = self.lead
        if self.max_staleness is None or lead is None:
            return math.inf
        ahead = (self.max_staleness + self.version + 1) * self.batch_groups
        ahead = min(ahead, (self.step + 1) * self.batch_groups + lead)
        if self.steps is not None:
            ahead = min(ahead, self.steps * self.batch_groups)
        return ahead - self.accepted - self.running

    def can_admit(self) -> bool:
        """Return whether a group may start now."""
        return self.capacity > 0

    @property
    def waiting(self) -> int:
        """Return the number of accepted groups that no completed step has used."""
        return self.accepted - self.step * self.batch_groups

    def on_admitted(self) -> None:
        """Count a group that starts."""
        assert self.capacity > 0, "admitted a group without capacity"
        self.running += 1

    def on_accepted(self) -> None:
        """Count a running group that has finished and waits for the trainer."""
        assert self.running > 0, "accepted a group that was not running"
        self.running -= 1
        self.accepted += 1

    def on_rejected(self) -> None:
        """Count a running group that failed or was filtered; its capacity is free again."""
        assert self.running > 0, "rejected a group that was not running"
        self.running -= 1
        self.rejected += 1

    def on_step(self, step: int) -> None:
        """Record that `step` steps are complete."""
        assert step >= self.step, f"completed steps went back from {self.step} to {step}"
        if step > self.step and self.max_staleness:
            # More would start no group earlier, and take steps to forget.
            late = min(self.running, (self.max_staleness - 1) * self.batch_groups)
            if late > self.late:
                self.late = late
            elif not self.awaited:
                self.late += (late - self.late) / _FORGETS
        self.step, self.awaited = step, self.accepted < (step + 1) * self.batch_groups

    def on_version(self, version: int) -> None:
        """Record that `version` steps are complete and that the servers have these weights."""
        self.on_step(version)
        self.version = version

    def recover(self, step: int, version: int, waiting: int) -> None:
        """Resume after `step` steps with `waiting` finished groups. The servers have `version`."""
        assert self.running == self.accepted == self.step == 0, "the run has already begun"
        self.step, self.version = step, version
        self.accepted = step * self.batch_groups + waiting


Traces = list[Trajectory]  # of an episode
_NO_BOUND = 2**30  # in versions: more steps than any run has


@dataclass(slots=True, kw_only=True)
class BatchAssignment:
    """The batch of one training step."""

    groups: list[Group]
    shards: list[TrainBatch]  # one per data-parallel rank
    masked_tokens: int = 0  # overdue ones
    group_ids: list[int] = field(default_factory=list)  # the groups that the step uses up
    passed: int = 0  # groups that passed the oldest unfinished group, up to this batch
    # Replay: group id and sample index of each episode, by group of the batch.
    draws: list[list[tuple[int, int]]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)  # for the metrics

    def join_routes(self) -> None:
        """Give the shards their routes: up to a gigabyte, which is not for an event loop."""
        for shard, groups in zip(self.shards, balanced_shards(self.groups, len(self.shards))):
            routes = [t.routes for group in groups for t in group.trajectories]
            shard.routes = join_routes(routes, shard.lengths.tolist())


class GroupQueue:
    """Finished groups in the order of admission."""

    def __init__(self, max_staleness: int | None, window: int | None = None):
        """Make an empty queue with these settings of `buffer`; None means no limit."""
        self._max_staleness = _NO_BOUND if max_staleness is None else max_staleness
        self._window = window
        self._groups: list[Group] = []
        # Ids of taken groups that are younger than the oldest running one, ascending.
        self._passed: list[int] = []

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        assert group.trajectories, "an empty group cannot be trained on"
        bisect.insort(self._groups, group, key=lambda g: g.group_id)

    def num_passing(self, count: int, oldest_running: int | None) -> int:
        """Return how many groups have passed `oldest_running` when `count` more are taken."""
        if oldest_running is None:
            return 0
        passed = len(self._passed) - bisect.bisect(self._passed, oldest_running)
        return passed + sum(group.group_id > oldest_running for group in self._groups[:count])

    def held_back(self, count: int, oldest_running: int | None) -> bool:
        """Return whether a whole batch waits because the window lets no more groups pass."""
        if self._window is None or len(self._groups) < count:
            return False
        return self.num_passing(count, oldest_running) > self._window

    def take(
        self, count: int, version: int, num_shards: int, oldest_running: int | None = None
    ) -> BatchAssignment | None:
        """Take the oldest `count` groups; None while there are fewer, or while they may not pass.

        `version` is the trainer's at the start of the step, and `oldest_running` the `group_id` of
        the oldest group that is being generated. Raises ValueError if the shards cannot be equal.
        """
        if len(self._groups) < count or self.held_back(count, oldest_running):
            return None
        passed = self.num_passing(count, oldest_running)
        batch = self.deal(self._groups[:count], version, num_shards, passed)
        del self._groups[:count]
        oldest = math.inf if oldest_running is None else oldest_running
        self._passed = sorted(i for i in self._passed + batch.group_ids if i > oldest)
        return batch

    def deal(
        self, groups: list[Group], version: int, num_shards: int, passed: int = 0
    ) -> BatchAssignment:
        """Make the batch of these groups. Raises ValueError if the shards cannot be equal."""
        shards = make_shards(groups, num_shards)
        masked = 0
        for shard in shards:
            overdue = shard.loss_mask & (shard.versions < version - self._max_staleness)
            shard.loss_mask &= ~overdue
            masked += int(np.count_nonzero(overdue))
        return BatchAssignment(
            groups=groups,
            shards=shards,
            masked_tokens=masked,
            group_ids=[group.group_id for group in groups],
            passed=passed,
        )


def make_shards(groups: Sequence[Group], num_shards: int) -> list[TrainBatch]:
    """Lay out one TrainBatch per data-parallel rank, without routes."""
    return [
        TrainBatch.from_trajectories(
            [t for group in shard for t in group.trajectories], with_routes=False
        )
        for shard in balanced_shards(groups, num_shards)
    ]


def balanced_shards(groups: Sequence[Group], num_shards: int) -> list[list[Group]]:
    """Distribute whole groups over data-parallel ranks, equally many to each.

    Greedily, the longest group goes to the rank with the fewest tokens. Those that its samples
    share count once. Raises ValueError if the groups cannot be distributed equally.
    """
    if len(groups) % num_shards:
        raise ValueError(
            f"{len(groups)} groups cannot be divided equally among {num_shards} data-parallel ranks"
        )
    capacity = len(groups) // num_shards
    if num_shards == 1:
        return [sorted(groups, key=lambda g: g.group_id)]
    num_tokens = {g.group_id: g.distinct_tokens for g in groups}
    shards: list[list[Group]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for group in sorted(groups, key=lambda g: (-num_tokens[g.group_id], g.group_id)):
        open_shards = [i for i in range(num_shards) if len(shards[i]) < capacity]
        target = min(open_shards, key=lambda i: (load[i], i))
        shards[target].append(group)
        load[target] += num_tokens[group.group_id]
    return [sorted(shard, key=lambda g: g.group_id) for shard in shards]


class ReplayBuffer(GroupQueue):
    """A queue that draws batches. `len` is the number of prompts that can be drawn."""

    def __init__(self, config: ReplayConfig, group_size: int, seed: int):
        super().__init__(None)
        self._config = config
        self._group_size = group_size
        self._seed = seed
        # The prompt that was added to last comes last. Of each, the oldest episode comes first.
        self._prompts: dict[str, list[Traces]] = {}
        self._used: set[int] = set()  # ids of rollout groups in the buffer that a step has used

    def __len__(self) -> int:
        return sum(len(episodes) > 1 for episodes in self._prompts.values())

    def __iter__(self) -> Iterator[list[Traces]]:
        """Iterate over the episodes of each prompt."""
        return iter(self._prompts.values())

    @property
    def group_ids(self) -> set[int]:
        """Return the ids of the rollout groups that have an episode in the buffer."""
        return {traces[0].group_id for episodes in self for traces in episodes}

    @property
    def num_trajectories(self) -> int:
        """Return the number of trajectories in the buffer."""
        return sum(len(traces) for episodes in self for traces in episodes)

    def put(self, group: Group, used: bool = False) -> None:
        """Add a finished group. `used` says that a step has used it, before a resume."""
        before = self._prompts.pop(group.prompt_id, [])
        distinct: dict[tuple[bytes, ...], Traces] = {}
        for traces in reversed([*before, *group.episodes]):
            distinct.setdefault(tuple(t.tokens.tobytes() for t in traces), traces)
        newest = list(distinct.values())[: self._config.capacity]
        self._prompts[group.prompt_id] = newest[::-1]
        if used:
            self._used.add(group.group_id)
        if len(self._prompts) > MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def take(
        self, count: int, version: int, num_shards: int, oldest_running: int | None = None
    ) -> BatchAssignment | None:
        """Draw `count` groups for a trainer at `version`; None while there are fewer prompts."""
        if len(self) < count:
            return None
        rng = np.random.default_rng([self._seed, version])
        drawn = [self._draw(*chosen, rng) for chosen in self._choose(count, rng)]
        assignment = drawn_batch(drawn, version, num_shards)
        groups = {traces[0].group_id for episodes in drawn for traces in episodes}
        assignment.group_ids = sorted(groups - self._used)
        self._used = (self._used | groups) & self.group_ids
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

    def _draw(self, prompt_id: str, recent: bool, rng: np.random.Generator) -> list[Traces]:
        """Draw as many episodes of one prompt as a group has, oldest first."""
        held = self._prompts[prompt_id]
        if recent:
            return held[-self._group_size :]
        logits = np.array([episode_reward(traces) for traces in held], np.float64)
        best = np.argsort(-(logits + rng.gumbel(size=len(held))))[: self._group_size]
        return [held[i] for i in sorted(best.tolist())]


def drawn_batch(drawn: list[list[Traces]], version: int, num_shards: int) -> BatchAssignment:
    """Make the batch of step `version` from its draws; it uses up no groups. Raises as `deal`."""
    groups = []
    for number, episodes in enumerate(drawn, start=version * len(drawn)):
        # They may come from several rollout groups.
        traces = [
            replace(trace, group_id=number, sample_index=sample_index)
            for sample_index, traces in enumerate(episodes)
            for trace in traces
        ]
        prompt_id, size = traces[0].prompt_id, len(episodes)
        groups.append(Group(group_id=number, prompt_id=prompt_id, size=size, trajectories=traces))
    return BatchAssignment(
        groups=groups,
        shards=make_shards(groups, num_shards),
        draws=[[(e[0].group_id, e[0].sample_index) for e in episodes] for episodes in drawn],
    )
