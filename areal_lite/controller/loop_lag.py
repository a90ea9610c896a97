"""How late an event loop wakes who sleeps: the time for which something blocked it, or for which its process got no CPU."""

from __future__ import annotations

import asyncio

import numpy as np

_EVERY_S = 0.01


class LoopLag:
    """`watch` runs until cancelled. Keeps what was seen since the last `take_p99`."""

    def __init__(self) -> None:
        self._late: list[float] = []

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self._late.append(loop.time() - due)

    def take_p99(self) -> float:
        """Seconds that 99 in 100 wake-ups since the last call were not later than; 0 without any."""
        late, self._late = self._late, []
        return float(np.quantile(late, 0.99)) if late else 0.0
