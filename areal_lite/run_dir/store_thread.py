"""A Store on a thread of its own, with an asyncio interface.

* `await submit(Store.admit, ...)` returns after the change is committed.
* Calls take effect in the order of submission.
* A power cut does not undo a call that was `durable`, nor a call before it.
* Calls that are queued at the same time are committed together. If one of them fails, all of them
  are undone and get its exception: nothing is ever half-written.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_lite.run_dir.store import Store
from areal_lite.run_dir.store_file import StoreError

T = TypeVar("T")

# Each result may wake a whole group that has requests to send. The event loop serves others after
# this many.
_RESULTS_AT_ONCE = 2


@dataclass(slots=True)
class _Call:
    """A call to run; without a method, the request to close. Then its result or error."""

    future: asyncio.Future[Any]
    method: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    durable: bool = False
    result: Any = None
    error: Exception | None = None


class StoreThread:
    """Runs the methods of a Store. Create it inside a running event loop."""

    def __init__(self, store: Store):
        self._store = store
        self._queue: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def submit(
        self, method: Callable[..., T], *args: Any, durable: bool = False
    ) -> asyncio.Future[T]:
        """Queue `method(store, *args)` and return the future of its result."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Call(future, method, args, durable))
        return future

    async def close(self) -> None:
        """Commit what was submitted, then close the store."""
        future = self._loop.create_future()
        self._queue.put(_Call(future, None))
        await future

    def _run(self) -> None:
        while not self._commit_queued():
            pass

    def _commit_queued(self) -> bool:
        """Wait for calls, commit all queued ones at once, and return whether to end.

        No call outlives it: a call may hold a group of trajectories.
        """
        calls = [self._queue.get()]
        while not self._queue.empty():
            calls.append(self._queue.get())
        closing = [call for call in calls if call.method is None]
        self._commit([call for call in calls if call.method is not None])
        if closing:
            self._store.close()
            self._answer(closing)
        return bool(closing)

    def _commit(self, calls: list[_Call]) -> None:
        try:
            self._store.begin(durable=any(call.durable for call in calls))
            for call in calls:
                assert call.method is not None
                call.result = call.method(self._store, *call.args)
            self._store.commit()
        except Exception as error:  # raised to every caller
            with suppress(StoreError):  # a disk that is full may refuse this, too
                self._store.rollback()
            for call in calls:
                call.error = error
        self._answer(calls)

    def _answer(self, calls: list[_Call]) -> None:
        """Set the futures on the event loop, a few at a time."""
        self._loop.call_soon_threadsafe(self._settle, calls)

    def _settle(self, calls: list[_Call], first: int = 0) -> None:
        for call in calls[first : first + _RESULTS_AT_ONCE]:
            if call.future.cancelled():
                continue
            if call.error is not None:
                call.future.set_exception(call.error)
            else:
                call.future.set_result(call.result)
        if first + _RESULTS_AT_ONCE < len(calls):
            self._loop.call_soon(self._settle, calls, first + _RESULTS_AT_ONCE)
