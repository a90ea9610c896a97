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

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.servers.completion import Completion, SamplingParams
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
