"""Virtual time: an asyncio event loop whose clock jumps to the next timer.

Code that awaits timers, futures and tasks runs on it unchanged, and an hour passes as fast as its
events are computed. The order of events depends on the program alone, so a run repeats exactly.

* Time stands still while anything is ready to run. Work therefore takes no virtual time.
* There are no sockets and no threads: their events would come at a real time.
* A loop with nothing ready and no timer would wait without end. It raises RuntimeError instead.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time, which starts at 0 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        # The base class asks its selector how long to sleep, and for the events of sockets.
        self._selector = self

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Pass `timeout` seconds of virtual time. No socket has an event."""
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never happens")
        self._now += timeout
        return []

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        raise RuntimeError("no threads in virtual time: they would end at a real time")

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: `select` never returns an event."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread has to wake this loop."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
