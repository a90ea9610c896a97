"""The lag of an event loop: how late it wakes a task that sleeps.

The loop is late while something blocks it, or while its process gets no CPU.
"""

import asyncio

import numpy as np

_INTERVAL_S = 0.01


class LoopLag:
    """Measures the lag of the running event loop."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []

    async def watch(self) -> None:
        """Sleep and measure. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._lags_s.append(loop.time() - due)

    def take_p99(self) -> float:
        """Return the 99th percentile of the lags since the last call, in seconds; 0 if none."""
        lags, self._lags_s = self._lags_s, []
        return float(np.quantile(lags, 0.99)) if lags else 0.0
