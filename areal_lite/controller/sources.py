"""The data sources of a run: their prompts, their rewards, and how their episodes are played."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from areal_lite.config import TrainConfig, naming, source_configs
from areal_lite.config.data import Sampled, weight_of
from areal_lite.data.prompts import MixedPrompts, Prompt, PromptSet, load_prompts
from areal_lite.data.sampler import PromptSampler, SourceOrder
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.pool import RewardError, RewardPool
from areal_lite.rollout.episode import (
    Episode,
    Workflow,
    WorkflowFailed,
    WorkflowRun,
    sampled_turns,
)
from areal_lite.run_dir.store import StoreThread
from areal_lite.servers.client import SamplingParams
from areal_lite.servers.fleet import Fleet, Session
from areal_lite.trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data source."""

    config: Sampled  # the settings of the run, with those of the source
    prompts: PromptSet | None  # None when nothing is trained
    eval_prompts: PromptSet | None  # None without evaluation
    rewards: RewardPool


@asynccontextmanager
async def open_sources(config: Sampled) -> AsyncIterator[dict[str, Source]]:
    """Load the prompts and start the reward processes of each source, by its name.

    Sources with the same reward share its processes, which end with the block. Raises ValueError
    that names the source.
    """
    trains = isinstance(config, TrainConfig)
    evaluates = not trains or config.eval.problems > 0
    sources: dict[str, Source] = {}
    async with AsyncExitStack() as pools:
        for name, own in source_configs(config).items():
            with naming(name):
                same = (s.rewards for s in sources.values() if s.config.reward == own.reward)
                reward = own.reward
                load = partial(load_prompts, own.data, own.model, reward=reward.function)
                rewards = next(same, None) or await pools.enter_async_context(
                    RewardPool(reward.function, reward.workers, reward.timeout_s)
                )
                sources[name] = Source(
                    config=own,
                    prompts=load("train") if trains else None,
                    eval_prompts=load("eval") if evaluates else None,
                    rewards=rewards,
                )
        yield sources


def drawn_prompts(sources: Mapping[str, Source]) -> tuple[MixedPrompts, PromptSampler]:
    """Return the training prompts of all sources as one set, and its sampler."""
    prompts, orders = {}, []
    for name, source in sources.items():
        assert source.prompts is not None
        prompts[name] = source.prompts
        size, config = source.prompts.num_prompts, source.config
        orders.append(SourceOrder(size, config.seed, weight_of(config.data), name))
    return MixedPrompts(prompts), PromptSampler(*orders)


def of_source(key: str, source: str) -> str:
    """Return the name of a metric of one data source; `key` itself for one without a name."""
    return f"{key}/{source}" if source else key


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The parts that a simulator may replace."""

    sources: Mapping[str, Source]  # by name; a single one may have none
    tokenizer: Tokenizer  # decodes completions for the reward function
    store: StoreThread | None  # None when nothing is trained
    clock: Callable[[], float]  # returns seconds since 1970
    eval_sets: Mapping[str, PromptSet] = field(default_factory=dict)  # more of a single source
    workflow: Workflow | None = None  # None: that of `rollout.workflow` for each source


@dataclass(frozen=True, slots=True)
class Rollout:
    """The scored traces of an episode."""

    traces: list[Trajectory]
    texts: list[tuple[str, str]]  # before and after the first sampled token of each trace
    failure: str = ""  # why it has no reward


@dataclass(frozen=True, slots=True)
class Player:
    """Plays and scores episodes of one data source.

    `counts` gets `workflow_failures` and `reward_failures`. `on_end` is called when a rollout ends.
    """

    source: Source
    dependencies: Dependencies
    fleet: Fleet
    workflow: Workflow
    counts: Counter[str]
    on_end: Callable[[], None] = lambda: None

    async def play(
        self,
        group_id: int,
        prompt: Prompt,
        rids: Sequence[str],
        params: SamplingParams,
        first: int = 0,
    ) -> list[Rollout]:
        """Play a rollout for each request id on one ready server, from sample `first` on."""
        server = await self.fleet.reserve(len(rids))
        sessions = [Session(rid, server) for rid in rids]
        episodes = [
            Episode(
                prompt=prompt,
                sample_index=number,
                group_id=group_id,
                tokenizer=self.dependencies.tokenizer,
                params=params,
                clock=self.dependencies.clock,
                complete=partial(self.fleet.complete, session),
            )
            for number, session in enumerate(sessions, first)
        ]
        run = WorkflowRun(self.workflow, episodes)
        try:
            rollouts = await asyncio.gather(*(self._play(run, i) for i in range(len(episodes))))
        finally:
            for session in sessions:
                self.fleet.close_session(session)
        for session, rollout in zip(sessions, rollouts):
            for trace in rollout.traces:
                trace.server = session.server.name
        return rollouts

    async def _play(self, run: WorkflowRun, index: int) -> Rollout:
        episode = run.episodes[index]
        traces: list[Trajectory] = []
        try:
            traces = await run.traces(index)
            texts = [self._texts(episode.prompt, trace) for trace in traces]
            await self._score(episode.prompt, traces, texts[-1][1])
            return Rollout(traces, texts)
        except (WorkflowFailed, RewardError) as error:
            reason = "workflow" if isinstance(error, WorkflowFailed) else "reward"
            detail = f"no reward: {error}" if reason == "reward" else str(error)
            self.counts[f"{reason}_failures"] += 1
            name = (episode.prompt.prompt_id, episode.sample_index)
            log.warning("rollout of %s, sample %d: %s", *name, detail)
            return Rollout(traces, [], detail)
        finally:
            self.on_end()

    async def _score(self, prompt: Prompt, traces: list[Trajectory], sampled: str) -> None:
        """Give all traces the reward of the last answer, unless their workflow gave rewards.

        `sampled` is the text of the last trace from its first sampled token on.
        """
        if traces[-1].reward is None:
            turns = sampled_turns(traces[-1])
            if len(turns) > 1:
                sampled = self.dependencies.tokenizer.decode(traces[-1].tokens[turns[-1]])
            reward = await self.source.rewards.score(sampled, prompt.answer)
            for trace in traces:
                trace.reward = reward

    def _texts(self, prompt: Prompt, trace: Trajectory) -> tuple[str, str]:
        """Return the text before the first sampled token of a trace, and the text from there on."""
        decode = self.dependencies.tokenizer.decode
        start = int(trace.loss_mask.argmax())
        before, after = trace.tokens[:start], trace.tokens[start:]
        # The prompt's own text has the special tokens of the chat template.
        return prompt.text if before.tolist() == prompt.tokens else decode(before), decode(after)
