"""Play episodes in the worker processes of a data source, from the controller."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_lite.config.data import Sampled
from areal_lite.data.prompts import Prompt, Split
from areal_lite.rollout.episode import SINGLE_TURN, Rollout
from areal_lite.rollout.worker import Complete, FetchPrompt, Judge, Play, Sampler, own_filters
from areal_lite.system.processes import usable_cores
from areal_lite.trajectory import Group
from areal_lite.workers.pool import LATE_S, TaskFailed, WorkerPool
from areal_lite.workers.process import pack, unpack

_BLOCKED_S = 30.0  # a worker is killed after its event loop has been blocked for this long
_EPISODES_A_WORKER = 64  # with more, too many episodes restart when a process ends


def needs_workers(config: Sampled) -> bool:
    """Return whether the settings of a source name code that must not run in the controller."""
    own_data = ":" in config.data.source
    return own_data or config.rollout.workflow != SINGLE_TURN or bool(own_filters(config))


class EpisodePool(WorkerPool):
    """The processes of one source. They also serve its prompts if the user's code makes these."""

    def __init__(self, config: Sampled, splits: Sequence[Split]) -> None:
        rollout = config.rollout
        self._limit_s = rollout.episode_timeout_s
        workers = min(8 * usable_cores(), math.ceil(rollout.max_concurrent / _EPISODES_A_WORKER))
        silence_s = min(_BLOCKED_S, max(LATE_S, self._limit_s))
        own_splits = splits if ":" in config.data.source else ()
        super().__init__(
            rollout.workflow,
            "areal_lite.rollout.worker",
            (config, own_splits, silence_s),
            size=rollout.workers or workers,
            silence_s=silence_s,
            sequential=False,
        )

    async def play(self, name: str, request: Play, samplers: Sequence[Sampler]) -> list[Rollout]:
        """Play the episodes of `request`; `samplers` complete their tokens. Raises TaskFailed."""

        async def complete(body: msgspec.Raw) -> msgspec.Raw:
            asked = unpack(body, Complete)
            return pack(await samplers[asked.place](asked.tokens, asked.params))

        return await self._result(list[Rollout], request, name, complete)

    async def prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt of the user's own data. Raises TaskFailed."""
        return await self._result(Prompt, FetchPrompt(split, index))

    async def judge(self, name: str, group: Group) -> str | None:
        """Return a filter's reason to leave out a group. Raises TaskFailed."""
        return await self._result(str | None, Judge(name, group))

    async def _result(self, kind: Any, request: Any, name: str = "", answer: Any = None) -> Any:
        """Return the result of a request, of the type `kind`. Raises TaskFailed."""
        result = await self.call(request, name, self._limit_s, answer)
        try:
            return unpack(result, kind)
        except msgspec.MsgspecError as error:  # code of the user made it
            raise TaskFailed("bad_result", f"{self.name}: {error}") from None
