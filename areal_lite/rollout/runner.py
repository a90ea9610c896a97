"""Workflows: how a prompt becomes a trajectory. Token in, token out: nothing that a model sampled is ever tokenised again.

A workflow is `async def workflow(episode: Episode) -> Trajectory`, named by its import path (`rollout.workflow=module:name`) and called once
per sample_index of a group. One that is marked `grouped` gets the episodes of a whole group and returns as many trajectories, None for one that is
lost. A class is made once, with `rollout.workflow_args` as its keyword arguments, and its instance is called; if it has them,
`await start(config)` and `await close()` are called before the first episode and after the last. See docs/workflows.md.

Whatever a workflow raises costs its trajectory, not the run; it is counted, and a run that loses group after group ends.
If it sets `trajectory.reward`, the reward function is not asked.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_lite.config import RolloutConfig
from areal_lite.rollout.episode import Episode, Workflow, WorkflowFailed
from areal_lite.system.imports import load_object
from areal_lite.trajectory import Trajectory


def run_workflow(workflow: Workflow, episodes: list[Episode]) -> list[Awaitable[Trajectory]]:
    """One awaitable per episode of a group, in their order: its checked trajectory. They raise WorkflowFailed."""
    if not getattr(workflow, "grouped", False):
        return [_checked(episode, workflow(episode)) for episode in episodes]
    together = asyncio.ensure_future(workflow(episodes))

    async def sample_index(index: int) -> Trajectory:
        trajectories = await together
        if len(trajectories) != len(episodes):
            raise ValueError(
                f"a grouped workflow returned {len(trajectories)} trajectories for {len(episodes)} episodes"
            )
        return trajectories[index]

    return [_checked(episode, sample_index(index)) for index, episode in enumerate(episodes)]


async def _checked(episode: Episode, playing: Awaitable[Trajectory]) -> Trajectory:
    try:
        trajectory = await playing
        if not isinstance(trajectory, Trajectory):
            raise ValueError(f"the workflow returned {trajectory!r:.100}, not a Trajectory")
        if (trajectory.group_id, trajectory.sample_index) != (
            episode.group_id,
            episode.sample_index,
        ):
            raise ValueError(
                f"the workflow returned trajectory {trajectory.group_id}/{trajectory.sample_index} for {episode.group_id}/{episode.sample_index}"
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


@asynccontextmanager
async def started(workflow: Workflow, config: Any) -> AsyncIterator[None]:
    """The time between a workflow's `start(config)` and its `close()`, if it has them; `config` is the command's."""
    if start := getattr(workflow, "start", None):
        await start(config)
    try:
        yield
    finally:
        if close := getattr(workflow, "close", None):
            await close()
