"""A workflow that generates in static batches, as servers without continuous batching do."""

import asyncio
from collections import defaultdict

from areal_lite.rollout.episode import Episode, single_turn
from areal_lite.trajectory import Trajectory


class StaticBatches:
    """Answers `size` prompts at a time: a batch begins when the last answer before it has ended.

    The answers of a step, and those of an evaluation, must be a multiple of `size`: a batch does
    not end before it is full. `rollout.max_concurrent` must be at least `size`.
    """

    def __init__(self, size: int):
        self._size = size
        self._begun = self._ended = 0
        self._may_begin: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._may_begin[0].set()

    async def __call__(self, episode: Episode) -> Trajectory:
        batch = self._begun // self._size
        self._begun += 1
        await self._may_begin[batch].wait()
        try:
            return await single_turn(episode)
        finally:
            self._ended += 1
            if self._ended % self._size == 0:
                self._may_begin[self._ended // self._size].set()
