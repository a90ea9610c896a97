"""The input and the result of a workflow.

A workflow turns a prompt into a trajectory, or into a list of several: the traces of an episode. It
is an async function, or a class whose instances are called as one:

    async def exact_match(episode: Episode) -> Trajectory:
        transcript = Transcript(episode)  # begins with the prompt's tokens
        answer = await transcript.sample_text()
        reward = float(answer.strip() == episode.prompt.answer)
        return transcript.trajectory(reward)  # without a reward, the reward function scores it

`rollout.workflow=module:name` names it by its import path. It is called once per sample of a group.
See docs/workflows.md.

Invariants:
  * tokens in, tokens out: nothing that the policy sampled is ever tokenized again;
  * an exception in a workflow costs one episode, not the run;
  * the reward function is called only if the workflow set no reward.
"""

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.config import RolloutConfig
from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.servers.completion import Completion, SamplingParams
from areal_lite.system.imports import load_object
from areal_lite.trajectory import Trajectory

# (episode) -> Trajectory or list of them; if marked as grouped, (episodes) -> list of such results.
Workflow = Callable[..., Awaitable[Any]]


class WorkflowFailed(Exception):
    """A workflow made no usable trajectory of an episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One sample of a group: a prompt, and the means to answer it.

    `params.max_new_tokens` bounds everything that follows the prompt, environment tokens included.
    `clock()` returns seconds.

    `complete(tokens, params)` continues `tokens` (int32 [n]) and returns the finished Completion.
    Transcript calls it.
    """

    prompt: Prompt
    sample_index: int
    group_id: int
    tokenizer: Tokenizer
    params: SamplingParams
    clock: Callable[[], float]
    complete: Callable[..., Awaitable[Completion]]


def grouped(workflow: Workflow) -> Workflow:
    """Mark a function that is called once per group; a class sets `grouped = True` instead.

    It is called as `workflow(episodes: list[Episode])` and returns one result per episode, None for
    a failed one.
    """
    vars(workflow)["grouped"] = True
    return workflow


def sampled_turns(trajectory: Trajectory) -> list[slice]:
    """Return the runs of sampled tokens: the policy's turns. The last one is scored."""
    mask = trajectory.loss_mask  # the first token is never sampled
    edges = [*(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [slice(start, end) for start, end in zip(edges[::2], edges[1::2])]


def load_workflow(config: RolloutConfig) -> Workflow:
    """Import `rollout.workflow`. Raises ValueError if it cannot be used."""
    name, arguments = config.workflow, config.workflow_args
    workflow: Any = load_object("rollout.workflow", name)
    if inspect.isclass(workflow):
        try:
            workflow = workflow(**arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"rollout.workflow_args={arguments} do not fit {name}: {error}"
            ) from error
    elif arguments:
        raise ValueError(
            f"rollout.workflow_args={arguments}: {name} is a function, only a class takes any"
        )
    if not any(map(inspect.iscoroutinefunction, (workflow, type(workflow).__call__))):
        raise ValueError(
            f"rollout.workflow={name}: must be an `async def`,"
            " or a class whose instances are called as one"
        )
    return workflow


@asynccontextmanager
async def started(workflow: Workflow, config: Any) -> AsyncIterator[None]:
    """Await `workflow.start(config)` on entry and `workflow.close()` on exit, where it has them."""
    if start := getattr(workflow, "start", None):
        await start(config)
    try:
        yield
    finally:
        if close := getattr(workflow, "close", None):
            await close()


class WorkflowRun:
    """A workflow at work on the episodes of a group."""

    def __init__(self, workflow: Workflow, episodes: list[Episode]):
        self._workflow = workflow
        self._episodes = episodes
        self._group: asyncio.Future[Any] | None = None

    async def traces(self, index: int) -> list[Trajectory]:
        """Play an episode and return its traces, checked and numbered. Raises WorkflowFailed.

        A grouped workflow plays all episodes of the group when the first one is asked for.
        """
        try:
            result = await self._result(index)
            traces = result if isinstance(result, list) else [result]
            for number, trace in enumerate(traces):
                _check(self._episodes[index], trace)
                trace.trace_index = number
            _check_together(traces)
        except Exception as error:  # a user's code may raise anything
            raise WorkflowFailed(
                f"workflow: {type(error).__name__}: {error} ({_origin(error)})"
            ) from error
        return traces

    async def _result(self, index: int) -> Any:
        """Return what the workflow returns for an episode."""
        if not getattr(self._workflow, "grouped", False):
            return await self._workflow(self._episodes[index])
        if self._group is None:
            self._group = asyncio.ensure_future(self._workflow(self._episodes))
        results = await self._group
        if len(results) != len(self._episodes):
            raise ValueError(
                f"a grouped workflow returned {len(results)} results for"
                f" {len(self._episodes)} episodes"
            )
        return results[index]


def _check_together(traces: list[Trajectory]) -> None:
    if not traces:
        raise ValueError("the workflow returned an empty list: return at least one Trajectory")
    if [trace.trace_index for trace in traces] != list(range(len(traces))):
        raise ValueError("the workflow returned the same Trajectory twice")
    if len({trace.reward is None for trace in traces}) == 2:
        raise ValueError("the workflow set a reward for some traces only: set all, or none")


def _check(episode: Episode, trajectory: Any) -> None:
    if not isinstance(trajectory, Trajectory):
        raise ValueError(f"the workflow returned {trajectory!r:.100}, not a Trajectory")
    returned = f"{trajectory.group_id}/{trajectory.sample_index}"
    wanted = f"{episode.group_id}/{episode.sample_index}"
    if returned != wanted:
        raise ValueError(f"the workflow returned trajectory {returned} for {wanted}")
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise ValueError(f"the workflow set the reward {trajectory.reward}, which is not finite")
    if not trajectory.check().num_sampled:
        raise ValueError("the workflow did not sample a single token from the policy")


def _origin(error: Exception) -> str:
    """Return `file:line` of the statement that raised."""
    trace = error.__traceback__
    assert trace
    while trace.tb_next:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
