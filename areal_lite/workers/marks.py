"""Mark which request a process is executing, in memory that it shares with its pool (pool.py).

The event loop executes the tasks of many requests in turn. `install` makes it mark each of their
steps, so that the pool knows whose step killed the process or did not end. Plain functions run in
threads (`in_thread`), and each thread has a mark of its own. A step that ends with SystemExit or
KeyboardInterrupt raises RuntimeError, because asyncio would end the event loop.
"""

import asyncio
import faulthandler
import inspect
import mmap
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from itertools import count
from types import FrameType
from typing import Any

from areal_lite.workers.process import MARKS_BYTES, NUM_MARKS, place_of

REQUEST: ContextVar[int] = ContextVar("request", default=0)
"""The number of the request for which the present code runs."""


class Marks:
    """The shared memory: the mark of the event loop, and one for each thread."""

    def __init__(self) -> None:
        self._file = -1
        self._memory = memoryview(mmap.mmap(-1, MARKS_BYTES)).cast("q")  # in its own byte order
        self._slots = count(1)
        self._thread = threading.local()
        self._threads = ThreadPoolExecutor(NUM_MARKS - 1, initializer=self._take_slot)

    def _take_slot(self) -> None:
        self._thread.slot = next(self._slots)

    def set(self, number: int, slot: int = 0) -> None:
        self._memory[slot] = number

    def is_marked(self, number: int) -> bool:
        """Return whether a thread executes something of request `number`."""
        return number in self._memory[1:]

    async def in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a plain function in a thread."""
        number = REQUEST.get()

        def call() -> Any:
            self.set(number, self._thread.slot)
            try:
                return function(*args, **kwargs)
            except StopIteration as error:  # a future cannot have it
                raise RuntimeError("StopIteration") from error
            finally:
                self.set(0, self._thread.slot)

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, copy_context().run, call)

    def install(self, loop: asyncio.AbstractEventLoop, file: int) -> None:
        """Mark the steps of all tasks that the event loop creates for requests, in a file."""
        self._file, self._memory = file, memoryview(mmap.mmap(file, MARKS_BYTES)).cast("q")

        def create(loop: Any, coro: Coroutine[Any, Any, Any], **kwargs: Any) -> asyncio.Task[Any]:
            context = kwargs.get("context")
            if number := REQUEST.get() if context is None else context.get(REQUEST, 0):
                coro = _Marked(coro, number, self)
            return asyncio.Task(coro, loop=loop, **kwargs)

        loop.set_task_factory(create)  # pyright: ignore[reportArgumentType]

    def watch(self, seconds: float) -> None:
        """Write all stacks to the file at a crash, or unless called again within `seconds`."""
        os.lseek(self._file, MARKS_BYTES, os.SEEK_SET)
        faulthandler.enable(self._file)
        faulthandler.dump_traceback_later(seconds, file=self._file)


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are marked. A copy of the process that a step makes ends with it."""

    def __init__(self, inner: Coroutine[Any, Any, Any], number: int, marks: Marks):
        self._inner, self._number, self._marks = inner, number, marks
        self._pid = os.getpid()

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # cr_frame and the like

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        self._marks.set(self._number)
        try:
            return step(*args)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self._marks.set(0)
            if os.getpid() != self._pid:
                os._exit(0)


marks = Marks()  # the marks of this process


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function of the user returns; a plain one runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await marks.in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def waiting_at(task: asyncio.Task[Any]) -> str:
    """Return "file:line in function" where the user's code of a task waits, as far as known."""
    frames: list[FrameType] = []
    inner: Any = task.get_coro()
    while frame := getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None):
        frames.append(frame)
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    places = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
    return place_of(places[::-1])
