"""Prompts -> finished groups: admit while staleness and concurrency allow, generate, score, hand over.

All members of a group start together on one server, which then shares the prompt's KV cache between them. A reward is asked for as soon as
its trajectory is finished, not when its group is. Every prompt handed out is a group in the store before its first request is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from areal_lite.config import TrainConfig
from areal_lite.controller.admission import AdmissionGate
from areal_lite.controller.concurrency import Concurrency
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.filters import SolveRates, first_reason, load_filters
from areal_lite.data.sampler import PromptSampler
from areal_lite.rewards.pool import RewardError
from areal_lite.rollout.episode import Episode, WorkflowFailed, sampled_turns
from areal_lite.rollout.runner import load_workflow, run_workflow, started
from areal_lite.run_dir.store import Store
from areal_lite.servers.client import Client, ServerFailed
from areal_lite.servers.completion import SamplingParams
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.session import RolloutSession
from areal_lite.trajectory import Group, Trajectory

log = logging.getLogger(__name__)


_LOOK_EVERY_S = 1.0  # at the servers' loads


_LEAST_FILTERED_IN_A_ROW = (
    500  # before a run is given up: one useful group in a hundred is still found by then
)


class Dispatcher:
    """`deliver(group)` is called with each finished group.

    `counts`: groups, of the whole run; since the start of this process workflow_failures, reward_failures, failed_rollouts, empty_groups,
    dropped_groups. `filtered`: groups of the whole run by reason.
    """

    def __init__(
        self,
        config: TrainConfig,
        parts: Dependencies,
        fleet: Fleet,
        deliver: Callable[[Group], None],
    ):
        self._rollout, self._on_failure = config.rollout, config.reward.on_failure
        self._parts, self._fleet, self._deliver = parts, fleet, deliver
        self._params = SamplingParams(
            self._rollout.max_new_tokens, self._rollout.temperature, parts.tokenizer.eos_ids
        )
        self._config, self.workflow = config, load_workflow(config.rollout)
        self._sampler = PromptSampler(
            parts.prompts.num_prompts, config.data.seed, config.data.shuffle
        )
        self._wake = asyncio.Event()
        self._filters = load_filters(self._rollout.filters, self._rollout.active_sampling)
        self._solve_rates = SolveRates(self._rollout.retire_above)
        self._batch_groups = config.trainer.batch_groups
        self._empty_in_a_row = self._filtered_in_a_row = 0
        self.filtered: Counter[str] = Counter()
        eta = None if config.buffer.replay.capacity else config.buffer.max_staleness
        self.admission = AdmissionGate(eta, config.trainer.batch_groups, config.trainer.steps)
        self.concurrency = Concurrency(self._rollout.max_concurrent, self._rollout.group_size)
        self.in_flight = 0  # trajectories
        self.counts: Counter[str] = Counter()

    def recover(self, store: Store, version: int) -> None:
        """Before `run`: go on at `version` with what `store`, which nobody else uses yet, tells. Raises ValueError for another data set."""
        recovered = store.recover(version, self._parts.clock())
        self._sampler.check_draws(recovered.draws)
        if self._rollout.retire_above is not None:
            for index, rewards in store.rewards():
                if self._solve_rates.note(index, rewards):
                    self._sampler.retire(index)
        self._sampler.restore(
            {**self._sampler.state(), "drawn": recovered.drawn, "put_back": recovered.put_back}
        )
        self.counts["groups"] = recovered.groups
        self.filtered.update(recovered.filtered)
        self.admission.recover(version, recovered.waiting)

    async def run(self) -> None:
        """Runs until cancelled."""
        async with started(self.workflow, self._config), asyncio.TaskGroup() as groups:
            while True:
                while self._has_room():
                    groups.create_task(self._group(*self._admit()))
                self._fail_if_exhausted()
                self._wake.clear()
                await self._wake.wait()

    def _has_room(self) -> bool:
        fits = (
            self.in_flight == 0
            or self.in_flight + self._rollout.group_size <= self.concurrency.limit
        )
        return fits and self.admission.can_admit() and not self._sampler.exhausted

    def _fail_if_exhausted(self) -> None:
        """What waits for the trainer is used first."""
        admission = self.admission
        if (
            self._sampler.exhausted
            and admission.can_admit()
            and not admission.running
            and admission.waiting < self._batch_groups
        ):
            raise RuntimeError(
                f"the data set is exhausted at version {admission.version}: all {self.retired} prompts are retired, solved in more than "
                f"rollout.retire_above={self._rollout.retire_above} of their last groups, and {admission.waiting} groups wait for a batch "
                f"of {self._batch_groups}; {self._filtered_words()}: give more or harder prompts, or raise retire_above"
            )

    def _filtered_words(self) -> str:
        reasons = ", ".join(f"{groups} {reason}" for reason, groups in self.filtered.most_common())
        return f"{self.filtered.total()} groups were filtered ({reasons or 'none'})"

    @property
    def retired(self) -> int:
        """Prompts that will not be asked again."""
        return len(self._sampler.retired)

    def _admit(self) -> tuple[int, int, int]:
        """A new group, the place of its prompt in the data set, and how many were drawn so far."""
        group_id = self.counts["groups"]
        self.counts["groups"] += 1
        self.admission.on_admitted()
        self.in_flight += self._rollout.group_size
        return group_id, self._sampler.next(), self._sampler.drawn

    async def _group(self, group_id: int, index: int, drawn: int) -> None:
        size, parts = self._rollout.group_size, self._parts
        prompt = parts.prompts[index]
        await parts.store.submit(
            Store.admit, group_id, prompt.prompt_id, index, drawn, size, parts.clock()
        )
        server = await self._fleet.reserve(size)
        sessions = [
            RolloutSession(
                self._fleet, self._params, parts.tokenizer, f"{group_id}-{sample_index}", server
            )
            for sample_index in range(size)
        ]
        episodes = [
            Episode(
                prompt=prompt,
                sample_index=sample_index,
                group_id=group_id,
                tokenizer=parts.tokenizer,
                params=self._params,
                clock=parts.clock,
                complete=session.complete,
            )
            for sample_index, session in enumerate(sessions)
        ]
        members = await asyncio.gather(
            *map(self._member, episodes, run_workflow(self.workflow, episodes))
        )
        for session in sessions:
            session.release()
        survivors = [result for result in members if not isinstance(result, str)]
        reasons = [result for result in members if isinstance(result, str)]
        self.counts["failed_rollouts"] += len(reasons)
        if not survivors:
            await self._discard_empty(group_id, index, reasons[0])
            return
        self._empty_in_a_row = 0
        group = Group(
            group_id=group_id,
            prompt_id=prompt.prompt_id,
            size=size,
            trajectories=[trajectory for trajectory, _ in survivors],
            prompt_index=index,
        )
        record = self._rollout.record_text
        texts = [(prompt.text, text) if record else (None, None) for _, text in survivors]
        if self._solve_rates.retires(index, group):
            self._sampler.retire(index)
        if reason := first_reason(self._filters, group):
            await parts.store.submit(Store.finish, group, texts, reason, parts.clock(), "filtered")
            self._note_filtered(reason)
        else:
            lost = f"{len(reasons)} members lost: {reasons[0]}" if reasons else None
            await parts.store.submit(Store.finish, group, texts, lost, parts.clock())
            self._filtered_in_a_row = 0
            self.admission.on_accepted()
            self._deliver(group)
        self._wake.set()

    def _note_filtered(self, reason: str) -> None:
        """The next prompt gets its room; its own prompt comes again with the next epoch."""
        self.filtered[reason] += 1
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row > max(_LEAST_FILTERED_IN_A_ROW, 10 * self._batch_groups):
            raise RuntimeError(
                f"no batch can be made: {self._filtered_in_a_row} groups in a row were filtered, the last one for {reason}; "
                f"in all, {self._filtered_words()} of {self.counts['groups']}: prompts are all too hard or too easy, or filters too strict"
            )
        self.admission.on_rejected()

    async def _member(
        self, episode: Episode, playing: Awaitable[Trajectory]
    ) -> tuple[Trajectory, str] | str:
        """A scored trajectory and the text that followed its prompt, or why it was lost."""
        prompt, decode = episode.prompt, self._parts.tokenizer.decode
        try:
            trajectory = await playing
            turns = sampled_turns(trajectory)
            text = decode(trajectory.tokens[turns[0].start :])
            if trajectory.reward is None:
                last = text if len(turns) == 1 else decode(trajectory.tokens[turns[-1]])
                trajectory.reward = await self._parts.rewards.score(last, prompt.answer)
        except WorkflowFailed as error:
            self.counts["workflow_failures"] += 1
            log.warning(
                "no trajectory for %s, sample_index %d: %s",
                prompt.prompt_id,
                episode.sample_index,
                error,
            )
            return str(error)
        except RewardError as error:
            self.counts["reward_failures"] += 1
            log.warning(
                "no reward for %s, sample_index %d: %s",
                prompt.prompt_id,
                episode.sample_index,
                error,
            )
            if self._on_failure == "drop":
                return f"no reward: {error}"
            trajectory.reward = 0.0
        finally:
            self.in_flight -= 1
            self._wake.set()
        return trajectory, text

    async def _discard_empty(self, group_id: int, index: int, reason: str) -> None:
        self.counts["empty_groups"] += 1
        self._empty_in_a_row += 1
        if self._empty_in_a_row > 2 * self._batch_groups:
            raise RuntimeError(
                f"{self._empty_in_a_row} groups in a row lost all their members; the last one: {reason}"
            )
        await self._give_back(group_id, index, f"empty: {reason}")
        self.admission.on_rejected()

    async def drop(self, group: Group, reason: str) -> None:
        """A finished group will not be used: its prompt is handed out again, under a new group."""
        self.counts["dropped_groups"] += 1
        await self._give_back(group.group_id, group.prompt_index, reason)
        self.admission.on_revoked()

    async def _give_back(self, group_id: int, index: int, reason: str) -> None:
        await self._parts.store.submit(Store.drop, group_id, reason, self._parts.clock())
        self._sampler.put_back(index)
        self._wake.set()

    async def adapt(self, client: Client) -> None:
        """Keep the servers full, and no more. Runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            router = self._fleet.router
            servers = [server for server in router.servers.values() if router.is_ready(server)]
            loads = await asyncio.gather(*map(client.load, servers), return_exceptions=True)
            for error in loads:
                if isinstance(error, BaseException) and not isinstance(error, ServerFailed):
                    raise error
            if not any(
                isinstance(load, ServerFailed) for load in loads
            ):  # whether it has failed is the fleet's to say
                self.concurrency.observe(loads, self.in_flight)
                self._wake.set()

    def on_version(self, version: int) -> None:
        self.admission.on_version(version)
        self._wake.set()
