"""Plays the rollouts of one group: reserve a server -> play -> score.

* All rollouts of a group start on one server, which then shares the prompt's KV cache.
* An episode is scored when it is finished; it does not wait for its group.
* Every rollout ends as a `Rollout` or a `RolloutFailure`. Any other error is a bug and is raised.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from areal_lite.config import TrainConfig
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.sources import Source
from areal_lite.data.model_folder import expert_layout
from areal_lite.data.prompts import Prompt
from areal_lite.rewards.pool import RewardError
from areal_lite.rollout.episode import Episode, Workflow, WorkflowFailed, sampled_turns
from areal_lite.rollout.runner import WorkflowRun
from areal_lite.servers.completion import Session, sampling_params
from areal_lite.servers.fleet import Fleet
from areal_lite.trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The scored traces of an episode, with the text before and after the first sampled token."""

    traces: list[Trajectory]
    texts: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """The reason why a rollout has no scored traces."""

    reason: Literal["workflow", "reward"]
    detail: str


class GroupPlayer:
    """Plays and scores the rollouts of the groups of one data source.

    Args:
        source: where the prompts are from; its settings and its rewards are used.
        dependencies: tokenizer and clock are used.
        fleet: the servers.
        workflow: plays one episode per rollout.
        counts: `workflow_failures` and `reward_failures` are counted here.
        on_end: called when a rollout has ended.
    """

    def __init__(
        self,
        source: Source,
        dependencies: Dependencies,
        fleet: Fleet,
        workflow: Workflow,
        counts: Counter[str],
        on_end: Callable[[], None],
    ):
        config = source.config
        self._group_size = config.rollout.group_size
        self._drop_unscored = config.reward.on_failure == "drop"
        self._tokenizer = dependencies.tokenizer
        self._rewards = source.rewards
        self._clock = dependencies.clock
        self._fleet = fleet
        self._workflow = workflow
        self._counts = counts
        self._on_end = on_end
        self._params = sampling_params(config.rollout, self._tokenizer)
        if isinstance(config, TrainConfig) and config.algo.routing_replay:
            self._params = replace(self._params, experts=expert_layout(Path(config.model)))

    async def play(self, group_id: int, prompt: Prompt) -> list[Rollout | RolloutFailure]:
        """Wait for a ready server, then for all rollouts of the group."""
        sessions = await self._reserve(group_id)
        episodes = [
            Episode(
                prompt=prompt,
                sample_index=sample_index,
                group_id=group_id,
                tokenizer=self._tokenizer,
                params=self._params,
                clock=self._clock,
                complete=partial(self._fleet.complete, session),
            )
            for sample_index, session in enumerate(sessions)
        ]
        run = WorkflowRun(self._workflow, episodes)
        results = await asyncio.gather(*(self._play(episode, run) for episode in episodes))
        for session, result in zip(sessions, results):
            self._fleet.close_session(session)
            if isinstance(result, Rollout):
                for trace in result.traces:
                    trace.server = session.server.name
        return results

    async def _reserve(self, group_id: int) -> list[Session]:
        """Wait for a ready server, and open a session on it for each rollout."""
        server = await self._fleet.reserve(self._group_size)
        return [Session(f"{group_id}-{i}", server) for i in range(self._group_size)]

    async def _play(self, episode: Episode, run: WorkflowRun) -> Rollout | RolloutFailure:
        """Play one episode and score its traces."""
        try:
            return await self._score(episode, await run.traces(episode.sample_index))
        except WorkflowFailed as error:
            return self._failure("workflow", episode, str(error))
        finally:
            self._on_end()

    async def _score(self, episode: Episode, traces: list[Trajectory]) -> Rollout | RolloutFailure:
        """Give all traces the reward of the last answer, unless their workflow gave rewards."""
        texts = [self._texts(episode.prompt, trace) for trace in traces]
        if traces[-1].reward is None:
            turns = sampled_turns(traces[-1])
            answer = texts[-1][1]
            if len(turns) > 1:
                answer = self._tokenizer.decode(traces[-1].tokens[turns[-1]])
            try:
                reward = await self._rewards.score(answer, episode.prompt.answer)
            except RewardError as error:
                failure = self._failure("reward", episode, f"no reward: {error}")
                if self._drop_unscored:
                    return failure
                reward = 0.0
            for trace in traces:
                trace.reward = reward
        return Rollout(traces, texts)

    def _texts(self, prompt: Prompt, trace: Trajectory) -> tuple[str, str]:
        """Return the text before the first sampled token of a trace, and the text from there on."""
        decode = self._tokenizer.decode
        start = int(trace.loss_mask.argmax())
        before, after = trace.tokens[:start], trace.tokens[start:]
        # The prompt's own text has the special tokens of the chat template.
        return prompt.text if before.tolist() == prompt.tokens else decode(before), decode(after)

    def _failure(
        self, reason: Literal["workflow", "reward"], episode: Episode, detail: str
    ) -> RolloutFailure:
        """Count and log a failure."""
        self._counts[f"{reason}_failures"] += 1
        log.warning(
            "rollout of %s, sample %d: %s", episode.prompt.prompt_id, episode.sample_index, detail
        )
        return RolloutFailure(reason, detail)
