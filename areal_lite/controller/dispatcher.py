"""The dispatcher turns prompts into finished groups.

    admit -> reserve -> play -> score    -> classify -> deliver
             (`Player`, sources.py)         (`Dispatcher`)

* A group is in the store before its first request is sent.
* Every submitted group ends exactly once: as finished, filtered or dropped. A dropped group's
  prompt is drawn again, as a new group.
* The rollouts of a group start on as few servers as `Fleet.place` allows: a server computes their
  prompt once.
* An episode is scored when it is finished; it does not wait for its group.
* An error of a workflow or of a reward costs its rollout. Any other error is a bug and is raised.

tests/unit/controller/test_dispatcher.py asserts these.

A filter (`rollout.filters`) removes a group that teaches nothing, and another prompt takes its
place, so that batches stay full (active sampling; Olmo 3, arXiv 2512.13961). It is a function
f(group) that returns None to keep the group, or a short fixed name of the reason to filter it, by
which filtered groups are counted. Filters are called in order, in the source's worker processes.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.controller.buffer import AdmissionGate
from areal_lite.controller.sources import (
    Dependencies,
    Player,
    Source,
    drawn_prompt,
    of_source,
    prompt_sampler,
)
from areal_lite.data.model_folder import expert_layout
from areal_lite.data.prompts import Prompt
from areal_lite.data.sampler import PromptSampler
from areal_lite.rollout.episode import Rollout
from areal_lite.run_dir.store import Store
from areal_lite.servers.client import SamplingParams, sampling_params
from areal_lite.servers.fleet import Fleet
from areal_lite.trajectory import Group, GroupState
from areal_lite.workers.pool import TaskFailed

# The last groups of a prompt decide whether it is retired. One group alone may have been luck.
_NUM_RATES = 2


@dataclass(slots=True)
class Curriculum:
    """Retires and rests the prompts of `sampler` by the rewards of their groups (docs/groups.md).

    It reads the groups of the store only: a resumed run goes on with the same prompts.
    """

    sampler: PromptSampler
    retire_above: float | None
    rest_unsolved: int
    _rates: dict[int, tuple[float, ...]] = field(default_factory=dict)
    _unsolved: Counter[int] = field(default_factory=Counter)

    @property
    def active(self) -> bool:
        """Return whether rewards change which prompts are asked."""
        return self.retire_above is not None or self.rest_unsolved > 0

    def record(self, prompt_index: int, rewards: Sequence[float], drawn: int) -> None:
        """Record the rewards of a group. `drawn` counts the draws when it was admitted."""
        rate = sum(reward > 0 for reward in rewards) / len(rewards)
        if self.retire_above is not None:
            rates = (*self._rates.get(prompt_index, ()), rate)[-_NUM_RATES:]
            self._rates[prompt_index] = rates
            if len(rates) == _NUM_RATES and sum(rates) / len(rates) > self.retire_above:
                self.sampler.retire(prompt_index)
        if rate > 0:
            self._unsolved.pop(prompt_index, None)
        elif self.rest_unsolved:
            # The bound keeps the power small, however often a prompt was tried.
            epochs = min(2 ** min(self._unsolved[prompt_index], 30), self.rest_unsolved)
            self._unsolved[prompt_index] += 1
            self.sampler.rest(prompt_index, epochs, after=drawn)


def zero_variance(group: Group, *, of_turns: bool) -> str | None:
    """Filter a group whose rewards, of episodes and perhaps of turns, are all equal."""
    earned = {(t.reward, *(of_turns and t.turn_rewards or ())) for t in group.trajectories}
    return "zero_variance" if len(earned) == 1 else None


async def first_reason(config: TrainConfig, group: Group, source: Source) -> str | None:
    """Return the first reason to filter `group`, or None to keep it. Raises TaskFailed."""
    for name in config.rollout.filters:
        if name == zero_variance.__name__:
            reason = zero_variance(group, of_turns=config.algo.advantage.credit == "turns")
        else:
            assert source.episodes is not None
            reason = await source.episodes.judge(name, group)
        if reason:
            return reason
    return None


_STARTS_AT_ONCE = 4  # groups in one turn of the event loop: a new version may admit hundreds

# Consecutive filtered groups that are always allowed: a run in which one group in a hundred is
# useful continues.
_MIN_FILTERED_LIMIT = 500

FAILURE_COUNTS = ("workflow_failures", "reward_failures")
"""Counts that the rows of the store do not show. The controller saves them there."""
COUNTS = ("empty_groups", "failed_rollouts", *FAILURE_COUNTS)


def _sampling(source: Source, dependencies: Dependencies) -> SamplingParams:
    config = source.config
    params = sampling_params(config.rollout.sampling, dependencies.tokenizer)
    replays = isinstance(config, TrainConfig) and config.algo.routing_replay
    return replace(params, experts=expert_layout(Path(config.model))) if replays else params


@dataclass(frozen=True, slots=True)
class _Submission:
    """A group that was admitted, after `drawn` draws. `again`: the store has it already."""

    group_id: int
    prompt_index: int
    drawn: int
    again: bool = False


class Dispatcher:
    """Submits groups while admission and concurrency allow, and delivers them when they finish.

    `counts` (the COUNTS, `groups`, `stored`) and `filtered`, by reason, are of the whole run.
    `in_flight` counts episodes, `running` has the ids of the running groups.
    """

    def __init__(
        self,
        config: TrainConfig,
        dependencies: Dependencies,
        fleet: Fleet,
        deliver: Callable[[Group], None],
        on_rejected: Callable[[], None] = lambda: None,
    ):
        """Build it: `deliver` gets finished groups, and `on_rejected` is called after others."""
        assert dependencies.store is not None
        rollout = config.rollout
        self._config = config
        self.sources = dependencies.sources
        self._store, self._clock = dependencies.store, dependencies.clock
        self._deliver = deliver
        self._on_rejected = on_rejected
        self.counts, self.filtered = Counter[str](), Counter[str]()
        self.max_concurrent = rollout.max_concurrent
        self.in_flight = 0
        self.running: set[int] = set()
        self._players = {
            name: Player(source, dependencies, fleet, self.counts, self._on_rollout_end)
            for name, source in self.sources.items()
        }
        self._params = {name: _sampling(one, dependencies) for name, one in self.sources.items()}
        self.sampler = prompt_sampler(self.sources)
        self.quarantine = dependencies.quarantine
        self._curriculum = Curriculum(self.sampler, rollout.retire_above, rollout.rest_unsolved)
        self._batch_groups, self._group_size = config.trainer.batch_groups, rollout.group_size
        self.admission = AdmissionGate(
            max_staleness=None if config.buffer.replay.capacity else config.max_lead,
            batch_groups=self._batch_groups,
            fresh=config.buffer.freshness == "auto" and config.buffer.window is None,
            steps=config.trainer.steps,
        )
        self._again: deque[_Submission] = deque()
        self._lost_prompts: set[int] = set()  # since a group that had a rollout
        self._consecutive_filtered = 0
        self._wake = asyncio.Event()  # set when something changed that `run` may be waiting for
        # Set once the store gets the row of the group that was drawn last.
        self._stored: asyncio.Event | None = None

    def recover(self, store: Store, step: int, version: int, trainer_runs: bool = False) -> None:
        """Resume after `step` steps with the state in `store`. Call this before `run`.

        The servers have `version`. Raises ValueError for another data set. With
        `server.deterministic`, lost groups are played again under their numbers, on which their
        sampling and their place in the batch depend.
        """
        play_again = self._config.server.deterministic
        recovered = store.recover(step, self._clock(), play_again, trainer_runs)
        if play_again:
            self._again.extend(_Submission(*group, again=True) for group in recovered.again)
        self.sampler.check_draws(recovered.draws)
        for index in self.quarantine.indices:
            self.sampler.retire(index)
        if self._curriculum.active:
            for scored in store.rewards():
                self._curriculum.record(*scored)
        self.sampler.resume(recovered.drawn, recovered.put_back)
        by_state = store.counts()
        self.counts.update(dict.fromkeys(("groups", "stored"), sum(by_state.values())))
        self.counts.update(store.failures())
        totals = store.totals()
        self.counts.update({name: totals.get(name, 0) for name in FAILURE_COUNTS})
        store.set_totals(self.sampler.sizes)
        self.filtered.update(store.filtered())
        self.admission.recover(step, version, by_state[GroupState.FINISHED])

    async def run(self) -> None:
        """Start groups while there is capacity. Runs until cancelled."""
        async with asyncio.TaskGroup() as groups:
            while True:
                while self._may_submit():
                    for _ in range(_STARTS_AT_ONCE):
                        if not self._may_submit():
                            break
                        groups.create_task(self._run_group(self._submit()))
                    await asyncio.sleep(0)
                self._fail_if_exhausted()
                self._wake.clear()
                await self._wake.wait()

    def facts(self) -> dict[str, Any]:
        """Return the counts of the run so far, for the metrics of a step."""
        sampler = self.sampler
        return {
            "in_flight": self.in_flight,
            "concurrency_limit": self.max_concurrent,
            "admission_lead": self.admission.lead,
            **{name: self.counts[name] for name in COUNTS},
            "filtered_groups": self.filtered.total(),
            **{f"filtered_{reason}": groups for reason, groups in self.filtered.items()},
            "retired_prompts": len(sampler.retired) - len(self.quarantine.indices),
            "quarantined_prompts": len(self.quarantine.held),
            "resting_prompts": sampler.num_resting,
            **{of_source("epochs", name): n for name, n in sampler.epochs.items()},
        }

    def on_step(self, step: int) -> None:
        """Record that `step` steps are complete, while the servers keep their version."""
        self.admission.on_step(step)
        self._wake.set()

    def on_version(self, version: int) -> None:
        """Record the servers' new version, which opens admission."""
        self.admission.on_version(version)
        self._wake.set()

    def _may_submit(self) -> bool:
        fits = self.in_flight == 0 or self.in_flight + self._group_size <= self.max_concurrent
        left = bool(self._again) or not self.sampler.exhausted
        return fits and self.admission.can_admit() and left

    def _submit(self) -> _Submission:
        self.admission.on_admitted()
        self.in_flight += self._group_size
        if self._again:
            submission = self._again.popleft()
        else:
            group_id = self.counts["groups"]
            self.counts["groups"] += 1
            submission = _Submission(group_id, self.sampler.next(), self.sampler.drawn)
        self.running.add(submission.group_id)
        return submission

    async def _run_group(self, submission: _Submission) -> None:
        group_id, index = submission.group_id, submission.prompt_index
        before, stored = self._stored, asyncio.Event()
        self._stored = stored
        prompt = await drawn_prompt(self.sources, index)
        # In the order of the draws, although a process of the user may give a prompt late: a
        # resumed run numbers its groups by their rows, and these must have no gap.
        if before:
            await before.wait()
        stored.set()
        if not submission.again:
            self.counts["stored"] += 1
            admitted = group_id, prompt.prompt_id, index, submission.drawn, self._group_size
            await self._store.submit(Store.admit, *admitted, self._clock())
        if prompt.tokens:
            player, params = self._players[prompt.source], self._params[prompt.source]
            rids = [f"{group_id}-{i}" for i in range(self._group_size)]
            rollouts = await player.play(group_id, prompt, rids, params)
        else:
            self.in_flight -= self._group_size
            rollouts = [Rollout(failure=prompt.text)]
        await self._classify(submission, prompt, rollouts)
        self._wake.set()

    def _on_rollout_end(self) -> None:
        self.in_flight -= 1
        self._wake.set()

    async def _classify(
        self, submission: _Submission, prompt: Prompt, played: list[Rollout]
    ) -> None:
        """End the group: drop it if every rollout failed, filter it, or finish and deliver it."""
        if self.quarantine.record(prompt.prompt_id, played, submission.prompt_index):
            self.sampler.retire(submission.prompt_index)
        rollouts = [rollout for rollout in played if not rollout.failure]
        failures = [rollout.failure for rollout in played if rollout.failure]
        self.counts["failed_rollouts"] += len(failures)
        if not rollouts:
            await self._drop_empty(submission, failures[0])
            return
        group = Group(
            group_id=submission.group_id,
            prompt_id=prompt.prompt_id,
            size=len(played),
            trajectories=[trace for rollout in rollouts for trace in rollout.traces],
            prompt_index=submission.prompt_index,
        )
        texts = [text for rollout in rollouts for text in rollout.texts]
        self._curriculum.record(submission.prompt_index, group.rewards, submission.drawn)
        try:
            filtered = await first_reason(self._config, group, self.sources[prompt.source])
        except TaskFailed as error:
            await self._drop_empty(submission, f"filter: {error}")
            return
        self._lost_prompts.clear()
        state = GroupState.FILTERED if filtered else GroupState.FINISHED
        lost = f"{len(failures)} rollouts failed: {failures[0]}" if failures else None
        reason, now = filtered or lost, self._clock()
        await self._store.submit(Store.finish, group, texts, reason, now, state)
        if filtered:
            self._on_filtered(filtered)
            self._reject(submission.group_id)
            return
        self._consecutive_filtered = 0
        self.running.remove(group.group_id)
        self.admission.on_accepted()
        self._deliver(group)

    async def _drop_empty(self, submission: _Submission, failure: str) -> None:
        """Drop a group without a trajectory, and have its prompt drawn again."""
        group_id, index = submission.group_id, submission.prompt_index
        self.counts["empty_groups"] += 1
        self._lost_prompts.add(index)
        if len(self._lost_prompts) > 2 * self._batch_groups:
            raise RuntimeError(
                f"all groups of {len(self._lost_prompts)} prompts in a row lost all their "
                f"rollouts; the last one: {failure}"
            )
        await self._store.submit(Store.drop, group_id, f"empty: {failure}", self._clock())
        if index not in self.sampler.retired:
            self.sampler.put_back(index)
        self._reject(group_id)

    def _on_filtered(self, reason: str) -> None:
        """Count a filtered group. Raises RuntimeError after too many in a row."""
        self.filtered[reason] += 1
        self._consecutive_filtered += 1
        if self._consecutive_filtered > max(_MIN_FILTERED_LIMIT, 10 * self._batch_groups):
            raise RuntimeError(
                f"no batch can be made: {self._consecutive_filtered} groups in a row were "
                f"filtered, the last one for {reason}; in all, {self._describe_filtered()} of "
                f"{self.counts['groups']}: prompts are all too hard or too easy, "
                "or filters too strict"
            )

    def _reject(self, group_id: int) -> None:
        """End a group that no step will use. A batch may have waited for it."""
        self.running.remove(group_id)
        self.admission.on_rejected()
        self._on_rejected()

    def _fail_if_exhausted(self) -> None:
        """Raise RuntimeError if every prompt is retired, and no batch is left."""
        admission = self.admission
        is_idle = admission.can_admit() and not admission.running
        if self.sampler.exhausted and is_idle and admission.waiting < self._batch_groups:
            held, retired = len(self.quarantine.indices), len(self.sampler.retired)
            also = f" {held} others are in quarantine: this log says why." if held else ""
            raise RuntimeError(
                f"no prompt is left at step {admission.step}: all {retired - held} are retired "
                f"because more than {self._config.rollout.retire_above} (rollout.retire_above) of "
                f"the trajectories of their last groups were right.{also} Give more or harder "
                f"prompts, or raise rollout.retire_above. {admission.waiting} groups wait for a "
                f"batch of {self._batch_groups}; {self._describe_filtered()}"
            )

    def _describe_filtered(self) -> str:
        reasons = ", ".join(f"{groups} {reason}" for reason, groups in self.filtered.most_common())
        return f"{self.filtered.total()} groups were filtered ({reasons or 'none'})"
