"""Calls to SGLang servers for threads without an event loop, such as the trainer's.

All calls run on one event loop in a daemon thread, so a call that hangs never keeps the process
alive. Calls run concurrently: a call to each of several servers takes as long as the slowest one.
"""

import asyncio
import atexit
import functools
import os
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from areal_lite.servers.client import ServerError, ServerUnreachable, SGLangClient
from areal_lite.servers.registry import ServerInfo

_CLOSE_TIMEOUT_S = 1.0


class _Background:
    """An event loop on a daemon thread, and its client. A forked process makes its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="server calls").start()
        self.client: SGLangClient = self.start(self._make_client()).result()
        self._pid = os.getpid()
        atexit.register(self._close)

    def start(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    async def _make_client(self) -> SGLangClient:
        return SGLangClient(timeout_s=10.0)  # each call brings its own time-out

    def _close(self) -> None:
        if os.getpid() == self._pid:  # the thread does not live on in a forked process
            with suppress(TimeoutError):
                self.start(self.client.close()).result(_CLOSE_TIMEOUT_S)


@functools.cache
def _background(pid: int) -> _Background:
    return _Background()


def start_post(
    server: ServerInfo, path: str, body: dict[str, Any], timeout_s: float
) -> Future[Any]:
    """POST `body` as JSON, and return the future of the decoded answer (None if it is empty)."""
    background = _background(os.getpid())
    return background.start(background.client.post(server, path, body, timeout_s))


def post(server: ServerInfo, path: str, body: dict[str, Any], timeout_s: float) -> Any:
    """Return the answer to a `start_post`."""
    return start_post(server, path, body, timeout_s).result()


def post_each(
    servers: Iterable[ServerInfo], path: str, body: dict[str, Any], timeout_s: float
) -> list[ServerError]:
    """POST `body` to all servers at once, wait for all, and return the errors."""
    return server_errors([start_post(server, path, body, timeout_s) for server in servers])


def server_errors(calls: Iterable[Future[Any]]) -> list[ServerError]:
    """Wait for `calls` and return their errors. Raises an error that is not a ServerError."""
    errors = []
    for call in calls:
        if isinstance(error := call.exception(), ServerError):
            errors.append(error)
        elif error is not None:
            raise error
    return errors


def start_reaching(server: ServerInfo, timeout_s: float) -> Future[bool]:
    """Find out whether the server answers GET /health within `timeout_s`, with any status."""
    background = _background(os.getpid())

    async def reaches() -> bool:
        try:
            await background.client.check_reachable(server, timeout_s)
        except ServerError as error:
            return not isinstance(error, ServerUnreachable)
        return True

    return background.start(reaches())
