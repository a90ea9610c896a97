"""The data sources of a run: their prompts, their rewards, and how their episodes are played."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.config import TrainConfig, naming, source_configs
from areal_lite.config.data import RewardConfig, Sampled, weight_of
from areal_lite.data.prompts import Prompt, PromptSet, Split, load_prompts
from areal_lite.data.sampler import PromptSampler, SourceOrder
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.pool import JudgePool, RewardPool
from areal_lite.rewards.worker import is_rubric, load_reward_function
from areal_lite.rollout.episode import Rollout, Workflow, is_grouped, play, single_turn
from areal_lite.rollout.pool import EpisodePool, needs_workers
from areal_lite.rollout.worker import Play
from areal_lite.run_dir.paths import JUDGE_FILE, QUARANTINE_FILE
from areal_lite.run_dir.store import StoreThread
from areal_lite.servers.client import SamplingParams
from areal_lite.servers.fleet import Fleet, Session
from areal_lite.system.files import read_json, write_json
from areal_lite.workers.pool import TaskFailed

log = logging.getLogger(__name__)
_MOST_HAZARDS, _MOST_LOST = 2, 3  # as in Quarantine
_NAMED_AFTER_S = 30.0  # an episode that takes longer is named while it lasts


@dataclass(slots=True)
class RemotePrompts:
    """Prompts that the worker processes of a source have; `Source.prompt` asks for them."""

    num_prompts: int | None
    num_too_long: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data source."""

    config: Sampled  # the settings of the run, with those of the source
    prompts: PromptSet | RemotePrompts | None  # None when nothing is trained
    eval_prompts: PromptSet | RemotePrompts | None  # None without evaluation
    rewards: RewardPool
    episodes: EpisodePool | None = None  # None: it runs no code of the user

    async def prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt by its place in the split. Raises TaskFailed."""
        prompts = self.prompts if split == "train" else self.eval_prompts
        assert prompts is not None
        if isinstance(prompts, RemotePrompts):
            assert self.episodes is not None
            return await self.episodes.prompt(split, index)
        return prompts[index]

    async def score(self, completion: str, prompt: Prompt, begun: Callable[[], None]) -> float:
        """Return the reward of an answer; `begun` is as in `JudgePool`. Raises TaskFailed."""
        if not isinstance(self.rewards, JudgePool):
            return await self.rewards.score(completion, prompt.answer, prompt.info)
        turns = prompt.messages
        said = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns) or prompt.text
        asked = str(turns[0]["content"]) if len(turns) == 1 else said
        values = {f"info.{name}": str(value) for name, value in prompt.info.items()}
        values |= {"prompt": asked, "completion": completion, "answer": prompt.answer}
        return await self.rewards.verdict(values, begun)


@asynccontextmanager
async def open_sources(config: Sampled, run_dir: Path) -> AsyncIterator[dict[str, Source]]:
    """Load the prompts and start the reward processes of each source, by its name.

    Sources with the same reward share its processes, which end with the block. Raises ValueError
    that names the source.
    """
    trains = isinstance(config, TrainConfig)
    wanted: dict[Split, bool] = {"train": trains, "eval": not trains or config.eval.problems > 0}
    splits: list[Split] = [split for split in wanted if wanted[split]]
    sources: dict[str, Source] = {}
    async with AsyncExitStack() as pools:
        start = pools.enter_async_context
        for name, own in source_configs(config).items():
            with naming(name):
                reward = own.reward
                same = (s.rewards for s in sources.values() if s.config.reward == reward)
                rewards = next(same, None) or await start(_reward_pool(reward, run_dir))
                episodes = await start(EpisodePool(own, splits)) if needs_workers(own) else None
                remote = episodes.facts["prompts"] if episodes else {}
                sets: dict[Split, PromptSet | RemotePrompts] = {
                    split: RemotePrompts(*remote[split])
                    if split in remote
                    else load_prompts(own.data, own.model, split, reward.function)
                    for split in splits
                }
                sources[name] = Source(
                    config=own,
                    prompts=sets.get("train"),
                    eval_prompts=sets.get("eval"),
                    rewards=rewards,
                    episodes=episodes,
                )
        yield sources


def _reward_pool(config: RewardConfig, run_dir: Path) -> RewardPool:
    if not is_rubric(config.function):
        return RewardPool(config.function, config.workers, config.timeout_s)
    judge: Any = load_reward_function(config.function)
    return judge(config.workers, config.timeout_s, run_dir / JUDGE_FILE)


def prompt_sampler(sources: Mapping[str, Source]) -> PromptSampler:
    """Return what draws the training prompts of all sources."""
    orders = []
    for name, source in sources.items():
        assert source.prompts is not None
        size, config = source.prompts.num_prompts, source.config
        orders.append(SourceOrder(size, config.seed, weight_of(config.data), name))
    return PromptSampler(*orders)


async def drawn_prompt(sources: Mapping[str, Source], index: int) -> Prompt:
    """Return the training prompt of a sampler's index: prompt i of source k of K has K i + k.

    The name of its source is in it, and in front of its `prompt_id`. If the user's data fails to
    give it, it has no tokens, and its text says why.
    """
    place, number = divmod(index, len(sources))
    name, source = list(sources.items())[number]
    try:
        prompt = await source.prompt("train", place)
    except TaskFailed as error:
        prompt = Prompt(prompt_id=f"#{place}", tokens=[], answer="", text=str(error))
    if not name:
        return prompt
    return replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", source=name)


def of_source(key: str, source: str) -> str:
    """Return the name of a metric of one data source; `key` itself for one without a name."""
    return f"{key}/{source}" if source else key


def judge_facts(sources: Mapping[str, Source]) -> dict[str, float]:
    """Return what the judges did since the last call, for a step's metrics; {} without judges."""
    pools = {source.rewards for source in sources.values()}
    if not (judges := [pool for pool in pools if isinstance(pool, JudgePool)]):
        return {}
    counts = sum((judge.counts for judge in judges), Counter[str]())
    seconds = [value for judge in judges for value in judge.seconds]
    for judge in judges:
        judge.counts, judge.seconds = Counter(), []
    p50_s, p99_s = np.percentile(seconds or [np.nan], [50, 99]).tolist()
    facts = {f"judge_{name}": counts[name] for name in ("calls", "failed", "cached", "tokens")}
    return {**facts, "judge_p50_s": p50_s, "judge_p99_s": p99_s}


class Quarantine:
    """The prompts that are not asked again: `held` has the line of each in quarantine.json, by id.

    A prompt is held if its episodes hung or ended their process twice. It is also held, until the
    run starts again, if three of its groups in a row lost all their episodes; its line stays.
    """

    def __init__(self, run_dir: Path | None = None):
        self._file = run_dir / QUARANTINE_FILE if run_dir else None
        self._lines = read_json(self._file) if self._file else {}
        self.held = {prompt: line for prompt, line in self._lines.items() if line["lasts"]}
        self._hazards: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()

    @property
    def indices(self) -> set[int]:
        """Return the sampler's indices of the training prompts that are held."""
        return {line["prompt_index"] for line in self.held.values()} - {None}

    def record(self, prompt_id: str, rollouts: Sequence[Rollout], index: int | None = None) -> bool:
        """Record what became of a prompt's group, and return whether it is held from now on."""
        if hazards := [rollout.failure for rollout in rollouts if rollout.is_hazard]:
            self._hazards[prompt_id] += len(hazards)
        if all(rollout.failure for rollout in rollouts):
            self._lost[prompt_id] += 1
        else:
            self._lost.pop(prompt_id, None)
        is_dangerous = bool(hazards) and self._hazards[prompt_id] >= _MOST_HAZARDS
        if prompt_id in self.held or not (is_dangerous or self._lost[prompt_id] >= _MOST_LOST):
            return False
        failure = (hazards or [rollouts[0].failure])[-1]
        log.error("prompt %s is not asked again: %s", prompt_id, failure)
        line = {"prompt_index": index, "failure": failure, "lasts": is_dangerous}
        self._lines[prompt_id] = self.held[prompt_id] = line
        if self._file:
            with suppress(OSError):  # a full disk must not end a run because of this file
                write_json(self._file, self._lines)
        return True


Playing = dict[int, tuple[str, float, "Source"]]
"""The episodes in progress, the oldest first: name, begin, and source. Two may have one name."""


def longest_wait(playing: Playing) -> str:
    """Name the episode that has been played longest, and where it waits; "" if it is young."""
    for name, began_at, source in playing.values():
        if (seconds := asyncio.get_running_loop().time() - began_at) < _NAMED_AFTER_S:
            break
        where = source.episodes.place(name) if source.episodes else ""
        return f"{name} for {seconds:.0f} s{f' at {where}' if where else ''}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The parts that a simulator may replace."""

    sources: Mapping[str, Source]  # by name; a single one may have none
    tokenizer: Tokenizer  # decodes completions for the reward function
    store: StoreThread | None  # None when nothing is trained
    clock: Callable[[], float]  # returns seconds since 1970
    eval_sets: Mapping[str, PromptSet] = field(default_factory=dict)  # more of a single source
    quarantine: Quarantine = field(default_factory=Quarantine)
    playing: Playing = field(default_factory=dict)
    workflow: Workflow | None = None  # replaces each source's own


@dataclass(frozen=True, slots=True)
class Player:
    """Plays and scores episodes of one data source, in its worker processes or here."""

    source: Source
    dependencies: Dependencies
    fleet: Fleet
    counts: Counter[str]  # of workflow_failures and reward_failures
    on_end: Callable[[], None] = lambda: None  # of a rollout, also if it only waits for a judge
    what: str = "group"  # what it plays, for the names of episodes

    async def play(
        self, group_id: int, prompt: Prompt, rids: list[str], params: SamplingParams, first: int = 0
    ) -> list[Rollout]:
        """Play a rollout for each request id on ready servers, from sample `first` on."""
        servers = await self.fleet.place(len(rids))
        sessions = [Session(rid, server, holders=servers) for rid, server in zip(rids, servers)]
        size = len(rids) if self._grouped else 1
        calls = []
        for at in range(0, len(rids), size):
            some = sessions[at : at + size]
            samples = list(range(first + at, first + at + len(some)))
            calls.append(self._play(Play(group_id, samples, prompt, params), some))
        try:
            played = await asyncio.gather(*calls)
        finally:
            for session in sessions:
                self.fleet.close_session(session)
        rollouts = [rollout for call in played for rollout in call]
        for session, rollout in zip(sessions, rollouts):
            for trace in rollout.traces:
                trace.server = session.server.name
        return rollouts

    @property
    def _grouped(self) -> bool:
        own, pool = self.dependencies.workflow, self.source.episodes
        return pool.facts["grouped"] if pool and not own else is_grouped(own or single_turn)

    async def _play(self, request: Play, sessions: Sequence[Session]) -> list[Rollout]:
        """Play the episodes of one call of the workflow, and score them."""
        prompt, samples, playing = request.prompt, request.samples, self.dependencies.playing
        name = f"{self.what} {request.group_id}, sample {samples[0]}, prompt {prompt.prompt_id}"
        playing[id(request)] = name, asyncio.get_running_loop().time(), self.source
        try:
            played = await self._played(name, request, sessions)
        except TaskFailed as error:
            failed = Rollout(
                failure=f"workflow: {error}",
                timed_out=error.reason == "timeout",
                is_hazard=error.reason in ("timeout", "died"),
            )
            played = [failed] * len(samples)
        finally:
            del playing[id(request)]
        scored = (self._scored(prompt, number, one) for number, one in zip(samples, played))
        return await asyncio.gather(*scored)

    async def _played(self, name: str, request: Play, sessions: Sequence[Session]) -> list[Rollout]:
        """Call the workflow, in a worker process if there are any. Raises TaskFailed."""
        parts, pool = self.dependencies, self.source.episodes
        samplers = [partial(self.fleet.complete, session) for session in sessions]
        if pool and not parts.workflow:
            return await pool.play(name, request, samplers)
        episodes = request.episodes(samplers, parts.tokenizer, parts.clock)
        return await play(parts.workflow or single_turn, episodes)

    async def _scored(self, prompt: Prompt, sample: int, played: Rollout) -> Rollout:
        """Give all traces the reward of the last answer if they have none. Count a failure."""
        with ExitStack() as place:
            place.callback(self.on_end)
            part, failure, timed_out = "workflow", played.failure, played.timed_out
            if not failure and played.traces[-1].reward is None:
                try:
                    reward = await self.source.score(played.answer, prompt, place.close)
                    for trace in played.traces:
                        trace.reward = reward
                except TaskFailed as error:
                    part, failure = "reward", f"no reward: {error}"
                    timed_out = error.reason == "timeout"
        if not failure:
            return played
        self.counts[f"{part}_failures"] += 1
        log.warning("rollout of %s, sample %d: %s", prompt.prompt_id, sample, failure)
        return replace(played, failure=failure, timed_out=timed_out)
