"""Workflows: how a prompt becomes a trajectory. Token in, token out: nothing is ever tokenised again."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import numpy as np

from areal_lite.data.prompts import Prompt
from areal_lite.rollout.generate import Completion
from areal_lite.trajectory import Trajectory


async def single_turn(
    prompt: Prompt,
    member: int,
    group_id: int,
    complete: Callable[[np.ndarray], Awaitable[Completion]],
    clock: Callable[[], float] = time.time,
) -> Trajectory:
    """One prompt, one completion. `complete` takes prompt tokens int32 [n] to a finished Completion. Raises ValueError if the result breaks
    an invariant of trajectories."""
    started_at = clock()
    prompt_tokens = np.asarray(prompt.tokens, np.int32)
    completion = await complete(prompt_tokens)
    before, after = len(prompt_tokens), len(completion.tokens)
    return Trajectory(
        group_id=group_id,
        prompt_id=prompt.prompt_id,
        member=member,
        tokens=np.concatenate([prompt_tokens, completion.tokens]),
        loss_mask=np.repeat([False, True], [before, after]),
        behavior_logprobs=np.concatenate([np.zeros(before, np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(before, -1, np.int32), completion.versions]),
        finish_reason=completion.finish_reason,
        started_at=started_at,
        finished_at=clock(),
        requests=completion.requests,
    ).check()
