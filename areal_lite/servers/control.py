"""Control of SGLang servers over HTTP, from a blocking caller: each call goes to all servers at once and every answer is checked."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from areal_lite.servers.registry import ServerInfo

# Servers are addressed directly, as the controller does: a proxy in the environment is for other traffic.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """A server answered with an error, or (`answered` is False) not at all. `server` says which one."""

    def __init__(self, server: ServerInfo, message: str, answered: bool = False):
        super().__init__(f"server {server.name} ({server.url}): {message}")
        self.server, self.answered = server, answered


class ServersFailed(RuntimeError):
    """Something that servers do together failed, because of those in `errors`."""

    def __init__(self, errors: list[ServerError]):
        super().__init__("; ".join(str(error) for error in errors))
        self.errors = errors


def post(server: ServerInfo, path: str, body: dict[str, Any], timeout_s: float) -> Any:
    """POST `body` as JSON and return the answer. Raises ServerError unless it is a 200 that does not say `success: false`."""
    return _call(server, path, json.dumps(body).encode(), timeout_s)


def answers(server: ServerInfo, timeout_s: float) -> bool:
    """Does the process behind the URL answer at all?"""
    try:
        _call(server, "/health", None, timeout_s)
    except ServerError as error:
        return error.answered
    return True


def _call(server: ServerInfo, path: str, data: bytes | None, timeout_s: float) -> Any:
    headers = {"Content-Type": "application/json"}
    if server.api_key:
        headers["Authorization"] = f"Bearer {server.api_key}"
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with _direct.open(request, timeout=timeout_s) as response:
            raw = response.read()
    except urllib.error.HTTPError as error:
        raise ServerError(
            server,
            f"{path} answered {error.code}: {error.read()[:500].decode(errors='replace')}",
            answered=True,
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(server, f"{path} failed within {timeout_s:.0f} s: {error}") from error
    try:
        answer = json.loads(raw) if raw else None
    except ValueError:
        answer = raw.decode(errors="replace")
    if isinstance(answer, dict) and answer.get("success") is False:
        raise ServerError(server, f"{path}: {answer.get('message')}", answered=True)
    return answer


def in_thread(function: Callable[..., Any], *args: Any) -> Future:
    """Run `function` on a daemon thread: one that hangs in a collective must not keep the process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=getattr(function, "__name__", "call")).start()
    return future


def post_each(
    servers: Iterable[ServerInfo], path: str, body: dict[str, Any], timeout_s: float
) -> list[ServerError]:
    """POST the same body to all servers at once and wait for all; the errors of those that failed."""
    futures = [in_thread(post, server, path, body, timeout_s) for server in servers]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, ServerError):
            raise error
    return errors
