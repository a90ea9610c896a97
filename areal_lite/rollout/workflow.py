"""Workflows: how a prompt becomes a trajectory. Token in, token out: nothing that a model sampled is ever tokenised again.

A workflow is `async def workflow(episode: Episode) -> Trajectory`, named by its import path (`rollout.workflow=module:name`) and called once
per member of a group. One that is marked `grouped` gets the episodes of a whole group and returns as many trajectories, None for one that is
lost. A class is made once, with `rollout.workflow_args` as its keyword arguments, and its instance is called; if it has them,
`await start(config)` and `await close()` are called before the first episode and after the last. See docs/workflows.md.

Whatever a workflow raises costs its trajectory, not the run; it is counted, and a run that loses group after group ends.
If it sets `trajectory.reward`, the reward function is not asked.
"""

from __future__ import annotations

import asyncio
import bisect
import importlib
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.config import RolloutConfig
from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.rollout.fleet import Fleet
from areal_lite.rollout.generate import Completion, Piece, SamplingParams
from areal_lite.rollout.server import ServerInfo
from areal_lite.trajectory import Trajectory

Workflow = Callable[..., Awaitable[Any]]


class WorkflowFailed(Exception):
    """One episode has no trajectory; says why."""


@dataclass(frozen=True, slots=True)
class Episode:
    """What a workflow works with.

    `params`: how the policy is sampled; `params.max_new_tokens` bounds all that follows the prompt, environment tokens included.
    `complete(tokens int32 [n], max_new_tokens=None, stop=())` asks the policy to continue `tokens` and returns a Completion that has ended.
    It ends at the first of: an end token, `max_new_tokens`, the token that completes one of the texts in `stop`.
    `clock()` is in seconds.
    """

    prompt: Prompt
    member: int
    group_id: int
    tokenizer: Tokenizer
    params: SamplingParams
    clock: Callable[[], float]
    complete: Callable[..., Awaitable[Completion]]


class Transcript:
    """One trajectory in the making: sampled tokens and environment tokens, in the order in which the servers saw them."""

    def __init__(self, episode: Episode, tokens: Sequence[int] | None = None):
        """`tokens`: what it begins with, the episode's prompt if None."""
        self.episode = episode
        self.finish_reason = "abort"
        self._pieces: list[Piece] = []
        self._requests = 0
        self._started_at = episode.clock()
        self._add(np.asarray(episode.prompt.tokens if tokens is None else tokens, np.int32))
        self._limit = len(self.tokens) + episode.params.max_new_tokens

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]"""
        return np.concatenate([piece.tokens for piece in self._pieces])

    @property
    def room(self) -> int:
        """How many tokens may still follow."""
        return self._limit - len(self.tokens)

    async def complete(self, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> str:
        """Let the policy continue; returns the text that it wrote, without special tokens. There must be room."""
        return self.episode.tokenizer.decode((await self.sample(max_new_tokens, stop)).tokens)

    async def sample(
        self, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """`complete`, for who does not need the text."""
        budget = self.room if max_new_tokens is None else min(max_new_tokens, self.room)
        completion = await self.episode.complete(self.tokens, max_new_tokens=budget, stop=stop)
        self._pieces += completion.pieces
        self._requests += completion.requests
        self.finish_reason = completion.finish_reason
        return completion

    def reply(self, messages: Sequence[Message]) -> bool:
        """`append` environment messages: as the chat template writes them after an answer, or as plain text if the prompt is no chat."""
        tokenizer = self.episode.tokenizer
        if self.episode.prompt.messages:
            return self.append(tokenizer.chat_after_answer(messages))
        return self.append(
            tokenizer.encode(
                "".join(message["content"] for message in messages), add_special_tokens=False
            )
        )

    def append(self, tokens: Sequence[int]) -> bool:
        """Add environment tokens. False, with nothing added, if they would leave no room for an answer: the trajectory is then truncated."""
        if (
            tokens
            and tokens[0] == self._pieces[-1].tokens[-1]
            and tokens[0] in self.episode.params.stop_token_ids
        ):
            tokens = tokens[1:]  # the end of the answer, which the policy has sampled itself
        if len(tokens) >= self.room:
            self.finish_reason = "length"
            return False
        self._add(np.asarray(tokens, np.int32))
        return True

    def trajectory(self, reward: float | None = None) -> Trajectory:
        """What there is; whoever plays the workflow checks it."""
        episode = self.episode
        versions = np.concatenate([piece.versions for piece in self._pieces])
        return Trajectory(
            group_id=episode.group_id,
            prompt_id=episode.prompt.prompt_id,
            member=episode.member,
            tokens=self.tokens,
            loss_mask=versions >= 0,
            behavior_logprobs=np.concatenate([piece.logprobs for piece in self._pieces]),
            versions=versions,
            finish_reason=self.finish_reason,
            reward=reward,
            started_at=self._started_at,
            finished_at=episode.clock(),
            requests=self._requests,
            kv_version=min(
                (piece.kv_version for piece in self._pieces if piece.finish_reason), default=-1
            ),
        )

    def _add(self, tokens: np.ndarray) -> None:
        count = len(tokens)
        self._pieces.append(
            Piece(tokens, np.zeros(count, np.float32), np.full(count, -1, np.int32), "")
        )


async def single_turn(episode: Episode) -> Trajectory:
    """One prompt, one completion."""
    transcript = Transcript(episode)
    await transcript.sample()
    return transcript.trajectory()


class Place:
    """A trajectory's place on the servers: its turns go to the server that holds their prefix, as long as that one works.

    It begins with a place reserved on `server`; `release()` gives back one that was never used.
    """

    def __init__(
        self,
        fleet: Fleet,
        params: SamplingParams,
        tokenizer: Tokenizer,
        rid: str,
        server: ServerInfo,
    ):
        self._fleet, self._params, self._tokenizer, self._rid, self._server = (
            fleet,
            params,
            tokenizer,
            rid,
            server,
        )
        self._reserved = True
        self._turns = 0

    async def complete(
        self, tokens: np.ndarray, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """See Episode."""
        params = (
            self._params
            if max_new_tokens is None
            else replace(self._params, max_new_tokens=max_new_tokens)
        )
        # A server knows no text: a stop of several tokens is cut off afterwards, exactly where sampling would have ended.
        ids = [self._tokenizer.encode(text, add_special_tokens=False) for text in stop]
        singles = tuple(i[0] for i in ids if len(i) == 1)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *singles))
        rid = f"{self._rid}-{self._turns}"
        self._turns += 1
        completion = await self._fleet.complete(tokens, params, rid, await self._take())
        return _cut(completion, stop, self._tokenizer) if stop else completion

    async def _take(self) -> ServerInfo:
        if self._reserved:
            self._reserved = False
        else:
            self._server = await self._fleet.reserve(1, [self._server])
        return self._server

    def release(self) -> None:
        if self._reserved:
            self._reserved = False
            self._fleet.router.load[self._server.name] -= 1


def _cut(completion: Completion, stop: Sequence[str], tokenizer: Tokenizer) -> Completion:
    """The completion up to the token with which it first holds one of the texts `stop`."""
    tokens = completion.tokens

    def holds(count: int) -> bool:
        text = tokenizer.decode(tokens[:count])
        return any(s in text for s in stop)

    if not holds(len(tokens)):
        return completion
    end = bisect.bisect_left(range(len(tokens)), True, key=holds)
    kv_version = min(piece.kv_version for piece in completion.pieces)
    piece = Piece(
        tokens[:end], completion.logprobs[:end], completion.versions[:end], "stop", kv_version
    )
    return Completion([piece], completion.requests, "stop")


def grouped(workflow: Workflow) -> Workflow:
    """Mark a function as `async def workflow(episodes: list[Episode]) -> list[Trajectory | None]`; a class sets `grouped = True`."""
    workflow.grouped = True
    return workflow


def play(workflow: Workflow, episodes: list[Episode]) -> list[Awaitable[Trajectory]]:
    """One awaitable per episode of a group, in their order: its checked trajectory. They raise WorkflowFailed."""
    if not getattr(workflow, "grouped", False):
        return [_checked(episode, workflow(episode)) for episode in episodes]
    together = asyncio.ensure_future(workflow(episodes))

    async def member(index: int) -> Trajectory:
        trajectories = await together
        if len(trajectories) != len(episodes):
            raise ValueError(
                f"a grouped workflow returned {len(trajectories)} trajectories for {len(episodes)} episodes"
            )
        return trajectories[index]

    return [_checked(episode, member(index)) for index, episode in enumerate(episodes)]


async def _checked(episode: Episode, playing: Awaitable[Trajectory]) -> Trajectory:
    try:
        trajectory = await playing
        if not isinstance(trajectory, Trajectory):
            raise ValueError(f"the workflow returned {trajectory!r:.100}, not a Trajectory")
        if (trajectory.group_id, trajectory.member) != (episode.group_id, episode.member):
            raise ValueError(
                f"the workflow returned trajectory {trajectory.group_id}/{trajectory.member} for {episode.group_id}/{episode.member}"
            )
        if trajectory.reward is not None and not math.isfinite(trajectory.reward):
            raise ValueError(f"the workflow set the reward {trajectory.reward}")
        if not trajectory.check().num_sampled:
            raise ValueError("the policy was not asked for a single token")
    except (
        Exception
    ) as error:  # whatever a user's code raises over one episode: the caller counts it
        raise WorkflowFailed(
            f"workflow: {type(error).__name__}: {error} ({_origin(error)})"
        ) from error
    return trajectory


def _origin(error: Exception) -> str:
    """file:line where it was raised."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def sampled_turns(trajectory: Trajectory) -> list[slice]:
    """Where the policy spoke: the runs of sampled tokens, in order. What is scored is the last one."""
    mask = trajectory.loss_mask  # begins with False
    edges = [*(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [slice(start, end) for start, end in zip(edges[::2], edges[1::2])]


def load_workflow(config: RolloutConfig) -> Workflow:
    """The workflow that `rollout.workflow` names. Raises ValueError that says what is wrong with it."""
    workflow = load_object("rollout.workflow", config.workflow)
    if inspect.isclass(workflow):
        try:
            workflow = workflow(**config.workflow_args)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"rollout.workflow_args={config.workflow_args} do not fit {config.workflow}: {error}"
            ) from error
    elif config.workflow_args:
        raise ValueError(
            f"rollout.workflow_args={config.workflow_args}: {config.workflow} is a function, only a class takes any"
        )
    if not any(map(inspect.iscoroutinefunction, (workflow, type(workflow).__call__))):
        raise ValueError(
            f"rollout.workflow={config.workflow}: must be an `async def`, or a class whose instances are called as one"
        )
    return workflow


def load_object(key: str, name: str) -> Any:
    """What `module:name` names. Raises ValueError that names the key."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(
            f"{key}={name} must be module:name, such as areal_lite.rollout.workflow:single_turn"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{key}={name}: cannot import {module_name}: {error}") from error
    if not callable(found := getattr(module, attribute, None)):
        raise ValueError(f"{key}={name}: {module_name} has no callable {attribute!r}")
    return found


@asynccontextmanager
async def running(workflow: Workflow, config: Any) -> AsyncIterator[None]:
    """The time between a workflow's `start(config)` and its `close()`, if it has them; `config` is the command's."""
    if start := getattr(workflow, "start", None):
        await start(config)
    try:
        yield
    finally:
        if close := getattr(workflow, "close", None):
            await close()
