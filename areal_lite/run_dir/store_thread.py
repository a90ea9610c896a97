"""TODO docstring."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from areal_lite.run_dir.store import Store

T = TypeVar("T")


_ANSWERS_AT_ONCE = 8  # each may wake a whole group that has requests to send: the event loop sees to others in between


class StoreThread:
    """The asyncio front of a Store: `await submit(Store.admit, …)` returns once that is committed.

    Calls take effect in the order of submission. A call that fails gets its exception, and takes back with it what was to be committed
    together with it: those get the exception too. Nothing is ever half-written.
    """

    def __init__(self, store: Store):
        self._store = store
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def submit(self, method: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((future, method, args))
        return future

    async def close(self) -> None:
        """Commits what was submitted, then closes the file."""
        future = self._loop.create_future()
        self._queue.put((future, None, ()))
        await future

    def _run(self) -> None:
        while True:
            calls = [self._queue.get()]
            while not self._queue.empty():
                calls.append(self._queue.get())
            closing = [future for future, method, _ in calls if method is None]
            self._commit([call for call in calls if call[1] is not None])
            if closing:
                self._store.close()
                self._answer([(future, None, None) for future in closing])
                return

    def _commit(self, calls: list[tuple[asyncio.Future, Callable[..., Any], tuple]]) -> None:
        try:
            self._store.begin()
            results = [(future, method(self._store, *args), None) for future, method, args in calls]
            self._store.commit()
        except Exception as error:  # handed to those who wait
            self._store.rollback()
            results = [(future, None, error) for future, _, _ in calls]
        self._answer(results)

    def _answer(self, results: list[tuple[asyncio.Future, Any, Exception | None]]) -> None:
        def settle(first: int = 0) -> None:
            for future, value, error in results[first : first + _ANSWERS_AT_ONCE]:
                if future.cancelled():
                    continue
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(value)
            if first + _ANSWERS_AT_ONCE < len(results):
                self._loop.call_soon(settle, first + _ANSWERS_AT_ONCE)

        self._loop.call_soon_threadsafe(settle)
