"""Calls to SGLang servers for threads without an event loop, such as the trainer's.

All calls run on one event loop in a daemon thread, so a call that hangs never keeps the process
alive. Calls run concurrently: a call to each of several servers takes as long as the slowest one.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from areal_lite.servers.client import ServerError, ServerUnreachable, SGLangClient
from areal_lite.servers.registry import ServerInfo


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="server calls").start()
    return loop


# The thread does not survive a fork: a child process starts its own.
os.register_at_fork(after_in_child=_event_loop.cache_clear)


def start_post(
    server: ServerInfo, path: str, body: dict[str, Any], timeout_s: float
) -> Future[Any]:
    """Start `post` and return its future."""

    async def call() -> Any:
        async with SGLangClient(timeout_s) as client:
            return await client.post(server, path, body)

    return asyncio.run_coroutine_threadsafe(call(), _event_loop())


def post(server: ServerInfo, path: str, body: dict[str, Any], timeout_s: float) -> Any:
    """POST `body` as JSON and return the decoded answer. Raises ServerError."""
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
        error = call.exception()
        if isinstance(error, ServerError):
            errors.append(error)
        elif error is not None:
            raise error
    return errors


def is_reachable(server: ServerInfo, timeout_s: float) -> bool:
    """Return whether the server answers GET /health within `timeout_s`, with any status."""

    async def call() -> None:
        async with SGLangClient(timeout_s) as client:
            await client.check_reachable(server)

    try:
        asyncio.run_coroutine_threadsafe(call(), _event_loop()).result()
    except ServerError as error:
        return not isinstance(error, ServerUnreachable)
    return True
