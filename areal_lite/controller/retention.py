"""Keeps the store within `store.max_gib`, and tells the metrics how large it is.

After each step, groups that nothing needs lose their tokens (`run_dir/store_bound.py`). Each call
takes a moment of the store's thread, and other calls come between them. The trainer waits for none
of it.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from areal_lite.config import TrainConfig
from areal_lite.controller.batches import Batches
from areal_lite.controller.dispatcher import Dispatcher
from areal_lite.controller.replay import ReplayBuffer
from areal_lite.run_dir.resume import needed_since
from areal_lite.run_dir.store import Store
from areal_lite.run_dir.store_thread import StoreThread

log = logging.getLogger(__name__)

_GIB = 2**30


class Retention:
    """Removes tokens after each step, in a task of its own.

    Args:
        config: the run's configuration.
        store: the store.
        dispatcher: knows the groups that are not delivered yet.
        batches: knows the groups of the replay buffer, and gets the size of the store.
    """

    def __init__(
        self, config: TrainConfig, store: StoreThread, dispatcher: Dispatcher, batches: Batches
    ):
        self._max_gib = config.store.max_gib
        self._run_dir = Path(config.run_dir)
        self._store = store
        self._dispatcher = dispatcher
        self._batches = batches
        self._due = asyncio.Event()
        self._due.set()
        self._last_step: list[int] = []
        self._warned = False

    def on_step(self, group_ids: Sequence[int]) -> None:
        """Record that a step used these groups, and that the store may have grown."""
        self._last_step = list(group_ids)
        self._due.set()

    async def run(self) -> None:
        """Measure and trim the store after each step. Runs until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            size = await self._store.submit(Store.size, self._last_step)
            if self._max_gib is not None and size.get("store_mib", 0) > 1024 * self._max_gib:
                size = await self._trim(self._max_gib)
            self._batches.store_size = size

    async def _trim(self, max_gib: float) -> dict[str, float]:
        """Remove what may be removed, and return the size of the store then."""
        since = await asyncio.to_thread(needed_since, self._run_dir)
        max_bytes = int(max_gib * _GIB)
        while await self._store.submit(Store.trim, max_bytes, since, self._held()):
            pass
        size = await self._store.submit(Store.size, self._last_step)
        if size["store_mib"] > 1024 * max_gib and not self._warned:
            self._warned = True
            log.warning(
                "the store takes %.1f GiB, more than store.max_gib=%g: a resume needs the rest, "
                "which are the steps since step %d and the groups that wait; save checkpoints more "
                "often (trainer.save_every), or raise store.max_gib",
                size["store_mib"] / 1024,
                max_gib,
                since,
            )
        return size

    def _held(self) -> list[int] | None:
        """Return the groups that a replay buffer holds or is about to get; None without one."""
        queue = self._batches.queue
        if not isinstance(queue, ReplayBuffer):
            return None
        return list(queue.group_ids | self._dispatcher.running)
