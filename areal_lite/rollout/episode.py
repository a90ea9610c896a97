"""TODO docstring."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.servers.completion import Completion, SamplingParams
from areal_lite.trajectory import Trajectory

Workflow = Callable[..., Awaitable[Any]]


class WorkflowFailed(Exception):
    """One episode has no trajectory; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a workflow works with.

    `params`: how the policy is sampled; `params.max_new_tokens` bounds all that follows the prompt, environment tokens included.
    `complete(tokens int32 [n], max_new_tokens=None, stop=())` asks the policy to continue `tokens` and returns a Completion that has ended.
    It ends at the first of: an end token, `max_new_tokens`, the token that completes one of the texts in `stop`.
    `clock()` is in seconds.
    """

    prompt: Prompt
    sample_index: int
    group_id: int
    tokenizer: Tokenizer
    params: SamplingParams
    clock: Callable[[], float]
    complete: Callable[..., Awaitable[Completion]]


def grouped(workflow: Workflow) -> Workflow:
    """Mark a function as `async def workflow(episodes: list[Episode]) -> list[Trajectory | None]`; a class sets `grouped = True`."""
    workflow.grouped = True
    return workflow


def sampled_turns(trajectory: Trajectory) -> list[slice]:
    """Where the policy spoke: the runs of sampled tokens, in order. What is scored is the last one."""
    mask = trajectory.loss_mask  # begins with False
    edges = [*(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [slice(start, end) for start, end in zip(edges[::2], edges[1::2])]
