"""The worker processes that run a source's own code, as the controller sees them.

An episode of a worker that died begins anew in another one. What it asks again is not sampled
again: a completion of the same tokens belongs to it already.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import pickle
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from areal_lite.config.data import Sampled
from areal_lite.data.prompts import Prompt, Split
from areal_lite.rollout.episode import SINGLE_TURN, Played
from areal_lite.rollout.worker import Complete, FetchPrompt, Judge, Play, Setup
from areal_lite.servers.client import SamplingParams
from areal_lite.servers.fleet import Completion
from areal_lite.trajectory import Group
from areal_lite.workers.pool import LATE_S, WorkerPool
from areal_lite.workers.process import pack, unpack

# A worker whose event loop does not turn for so long is killed.
_BLOCKED_S = 30.0
# With more, a process that ends takes too many others with it, which begin anew.
_EPISODES_A_WORKER = 64
# An episode without end would ask for more.
_MOST_COMPLETIONS = 10_000

Sampler = Callable[[np.ndarray, SamplingParams], Awaitable[Completion]]


def own_filters(config: Sampled) -> list[str]:
    """Return the filters that are code of the user."""
    return [name for name in config.rollout.filters if ":" in name]


def needs_workers(config: Sampled) -> bool:
    """Return whether the settings of a source name code that must not run in the controller."""
    own_data = ":" in config.data.source
    return own_data or config.rollout.workflow != SINGLE_TURN or bool(own_filters(config))


class EpisodePool(WorkerPool):
    """The processes of one source. They serve its prompts, too, if these are of the user."""

    def __init__(self, config: Sampled, splits: Sequence[Split]) -> None:
        own_data = ":" in config.data.source
        rollout = config.rollout
        self._limit_s = rollout.episode_timeout_s
        most = 8 * len(os.sched_getaffinity(0))
        workers = min(most, math.ceil(rollout.max_concurrent / _EPISODES_A_WORKER))
        silence_s = min(_BLOCKED_S, max(LATE_S, self._limit_s))
        super().__init__(
            rollout.workflow,
            "areal_lite.rollout.worker",
            Setup(
                config=pickle.dumps(config),
                filters=own_filters(config),
                splits=list(splits) if own_data else [],
                silence_s=silence_s,
            ),
            size=rollout.workers or workers,
            silence_s=silence_s,
            sequential=False,
        )

    async def play(
        self, name: str, request: Play, samplers: Sequence[Sampler]
    ) -> list[Played | str]:
        """Play the episodes of `request`; see episode.play. `samplers` complete their tokens.

        Raises TaskFailed.
        """
        known = _Completions(samplers)
        try:
            limit_s = self._limit_s
            played = await self.call(request, name, limit_s, known.ask, known.begin_anew)
        finally:
            known.close()
        return unpack(played, list[Played | str])

    async def prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt of the user's own data. Raises TaskFailed."""
        return unpack(await self.call(FetchPrompt(split, index), "", self._limit_s), Prompt)

    async def judge(self, name: str, group: Group) -> str | None:
        """Return a filter's reason to leave out a group. Raises TaskFailed."""
        reason = await self.call(Judge(name, group), "", self._limit_s)
        return unpack(reason, str | None)  # pyright: ignore[reportArgumentType]


class _Completions:
    """The completions that the episodes of a request asked for."""

    def __init__(self, samplers: Sequence[Sampler]):
        self._samplers = samplers
        # The digests of questions, and the completions. A new attempt has not claimed any.
        self._asked: list[tuple[bytes, asyncio.Future[Completion]]] = []
        self._unclaimed: list[tuple[bytes, asyncio.Future[Completion]]] = []

    def ask(self, body: msgspec.Raw) -> Awaitable[msgspec.Raw]:
        """Return the completion of a `Complete`, which is known from now on."""
        question = hashlib.blake2b(bytes(body), digest_size=16).digest()
        known = next((one for one in self._unclaimed if one[0] == question), None)
        if known:
            self._unclaimed.remove(known)
        elif len(self._asked) == _MOST_COMPLETIONS:
            return self._refused()
        else:
            asked = unpack(body, Complete)
            sampling = self._samplers[asked.place](asked.tokens, asked.params)
            known = question, asyncio.ensure_future(sampling)
            self._asked.append(known)
        return self._packed(known[1])

    async def _refused(self) -> msgspec.Raw:
        raise ValueError(f"the episode has asked for {_MOST_COMPLETIONS} completions")

    async def _packed(self, completion: asyncio.Future[Completion]) -> msgspec.Raw:
        return pack(await asyncio.shield(completion))

    def begin_anew(self) -> None:
        self._unclaimed = list(self._asked)

    def close(self) -> None:
        for _, completion in self._asked:
            completion.cancel()
