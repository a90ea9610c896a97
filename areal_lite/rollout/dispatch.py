"""Prompts -> finished groups: admit while staleness and concurrency allow, generate, score, hand over.

All members of a group start together on one server, which then shares the prompt's KV cache between them. A reward is asked for as soon as
its trajectory is finished, not when its group is. Every prompt handed out is a ticket in the store before its first request is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from areal_lite.buffer.store import Store, StoreThread
from areal_lite.config import TrainConfig
from areal_lite.data.prompts import Prompt, PromptSet
from areal_lite.data.sampler import PromptSampler
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.pool import RewardError, RewardPool
from areal_lite.rollout.fleet import Fleet
from areal_lite.rollout.generate import SamplingParams
from areal_lite.rollout.server import ServerInfo
from areal_lite.rollout.staleness import Staleness
from areal_lite.rollout.workflow import single_turn
from areal_lite.trajectory import Group, Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What controller and dispatcher are made of; a simulator replaces those that wait for the world. `clock` is in seconds since 1970."""

    prompts: PromptSet | None
    eval_prompts: PromptSet | None
    tokenizer: Tokenizer
    rewards: RewardPool
    store: StoreThread
    clock: Callable[[], float]


class Dispatcher:
    """`deliver(group)` is called with each finished group.

    `counts`, since the start: tickets, reward_failures, lost_members, empty_groups, dropped_groups.
    """

    def __init__(self, config: TrainConfig, parts: Parts, fleet: Fleet, deliver: Callable[[Group], None]):
        self._rollout, self._on_failure = config.rollout, config.reward.on_failure
        self._parts, self._fleet, self._deliver = parts, fleet, deliver
        self._params = SamplingParams(self._rollout.max_new_tokens, self._rollout.temperature, parts.tokenizer.eos_ids)
        self._sampler = PromptSampler(parts.prompts.num_prompts, config.data.seed, config.data.shuffle)
        self._wake = asyncio.Event()
        self._prompt_index: dict[int, int] = {}
        self._empty_in_a_row = 0
        self._most_empty_in_a_row = 2 * config.trainer.batch_groups
        self.staleness = Staleness(config.buffer.max_staleness, config.trainer.batch_groups, config.trainer.steps)
        self.in_flight = 0  # trajectories
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as groups:
            while True:
                while self._has_room():
                    groups.create_task(self._group(self._admit()))
                self._wake.clear()
                await self._wake.wait()

    def _has_room(self) -> bool:
        fits = self.in_flight == 0 or self.in_flight + self._rollout.group_size <= self._rollout.max_concurrent
        return fits and self.staleness.can_admit()

    def _admit(self) -> int:
        group_id = self.counts["tickets"]
        self.counts["tickets"] += 1
        self._prompt_index[group_id] = self._sampler.next()
        self.staleness.admit()
        self.in_flight += self._rollout.group_size
        return group_id

    async def _group(self, group_id: int) -> None:
        index, size, parts = self._prompt_index[group_id], self._rollout.group_size, self._parts
        prompt = parts.prompts[index]
        await parts.store.submit(Store.admit, group_id, prompt.prompt_id, index, size, parts.clock())
        server = await self._fleet.reserve(size)
        members = await asyncio.gather(*(self._member(prompt, member, group_id, server) for member in range(size)))
        survivors = [result for result in members if not isinstance(result, str)]
        reasons = [result for result in members if isinstance(result, str)]
        self.counts["lost_members"] += len(reasons)
        if not survivors:
            await self._discard_empty(group_id, reasons[0])
            return
        self._empty_in_a_row = 0
        group = Group(group_id, prompt.prompt_id, size, [trajectory for trajectory, _ in survivors])
        record = self._rollout.record_text
        texts = [(prompt.text, text) if record else (None, None) for _, text in survivors]
        lost = f"{len(reasons)} members lost: {reasons[0]}" if reasons else None
        await parts.store.submit(Store.finish, group, texts, lost, parts.clock())
        self.staleness.accept()
        self._deliver(group)

    async def _member(self, prompt: Prompt, member: int, group_id: int, server: ServerInfo) -> tuple[Trajectory, str] | str:
        """A scored trajectory and its completion's text, or why it was lost."""

        async def complete(tokens):
            return await self._fleet.complete(tokens, self._params, f"{group_id}-{member}", server)

        try:
            trajectory = await single_turn(prompt, member, group_id, complete, self._parts.clock)
            text = self._parts.tokenizer.decode(trajectory.tokens[trajectory.loss_mask])
            trajectory.reward = await self._parts.rewards.score(text, prompt.answer)
        except RewardError as error:
            self.counts["reward_failures"] += 1
            log.warning("no reward for %s, member %d: %s", prompt.prompt_id, member, error)
            if self._on_failure == "drop":
                return f"no reward: {error}"
            trajectory.reward = 0.0
        finally:
            self.in_flight -= 1
            self._wake.set()
        return trajectory, text

    async def _discard_empty(self, group_id: int, reason: str) -> None:
        self.counts["empty_groups"] += 1
        self._empty_in_a_row += 1
        if self._empty_in_a_row > self._most_empty_in_a_row:
            raise RuntimeError(f"{self._empty_in_a_row} groups in a row lost all their members; the last one: {reason}")
        await self._give_back(group_id, f"empty: {reason}")
        self.staleness.reject()

    async def drop(self, group: Group, reason: str) -> None:
        """A finished group will not be used: its prompt is handed out again, under a new ticket."""
        self.counts["dropped_groups"] += 1
        await self._give_back(group.group_id, reason)
        self.staleness.revoke()

    async def _give_back(self, group_id: int, reason: str) -> None:
        await self._parts.store.submit(Store.discard, group_id, "dropped", reason, self._parts.clock())
        self._sampler.put_back(self._prompt_index.pop(group_id))
        self._wake.set()

    async def use(self, groups: list[Group], step: int) -> None:
        """`groups` were trained on at `step`."""
        await self._parts.store.submit(Store.use, [group.group_id for group in groups], step)
        for group in groups:
            del self._prompt_index[group.group_id]

    def bump(self, version: int) -> None:
        self.staleness.bump(version)
        self._wake.set()
