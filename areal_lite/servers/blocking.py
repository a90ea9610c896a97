"""Calls to SGLang servers for threads without an event loop, such as the trainer's.

All calls run on one event loop in a daemon thread, so a call that hangs never keeps the process
alive. Calls run concurrently: a call to each of several servers takes as long as the slowest one.
"""

import asyncio
import atexit
import functools
import os
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from areal_lite.servers.client import ServerError, ServerUnreachable, SGLangClient
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.processes import start_daemon

_CLOSE_TIMEOUT_S = 1.0


@functools.cache
def _background(pid: int) -> tuple[asyncio.AbstractEventLoop, SGLangClient]:
    """Start an event loop on a daemon thread, and its client. A forked process has its own."""
    loop = asyncio.new_event_loop()
    start_daemon(loop.run_forever)

    async def make_client() -> SGLangClient:
        return SGLangClient(timeout_s=10.0)  # each call brings its own time-out

    client = asyncio.run_coroutine_threadsafe(make_client(), loop).result()
    atexit.register(_close, pid)
    return loop, client


def _close(pid: int) -> None:
    if os.getpid() == pid:  # the thread does not live on in a forked process
        with suppress(TimeoutError):
            _start(SGLangClient.close).result(_CLOSE_TIMEOUT_S)


def _start(call: Callable[[SGLangClient], Coroutine[Any, Any, Any]]) -> Future[Any]:
    loop, client = _background(os.getpid())
    return asyncio.run_coroutine_threadsafe(call(client), loop)


def start_post(
    server: ServerInfo, path: str, body: dict[str, Any], timeout_s: float
) -> Future[Any]:
    """POST `body` as JSON, and return the future of the decoded answer (None if it is empty)."""
    return _start(lambda client: client.post(server, path, body, timeout_s))


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

    async def reaches(client: SGLangClient) -> bool:
        try:
            await client.check_reachable(server, timeout_s)
        except ServerError as error:
            return not isinstance(error, ServerUnreachable)
        return True

    return _start(reaches)
