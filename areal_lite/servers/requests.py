"""The requests in flight: sent through one gate, counted, and cancelled when their server fails."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from areal_lite.servers.answers import check_versions
from areal_lite.servers.client import Client, ServerError, ServerFailed, ServerNotReady
from areal_lite.servers.completion import GenerationChunk, SamplingParams
from areal_lite.servers.registry import ServerInfo
from areal_lite.servers.router import Router

_ABORT_AGAIN_S = 1.0


class RequestGate:
    """The only way of a request to a server.

    * Nothing is sent while the gate is closed, and nothing to a server that is not ready.
    * When a server fails, all requests on it end at once: one of them, or a health check, finds
      out for all.

    `counts` counts `requests` (sent) and `aborts` (requests that came back unfinished).
    """

    def __init__(self, client: Client, router: Router, counts: Counter[str], run_id: str):
        """Make a gate. `run_id` tells this controller from earlier ones on the same servers."""
        self._run_id = run_id
        self._client = client
        self._router = router
        self._counts = counts
        self.in_flight = 0
        self.last_failure: ServerError | None = None
        self._calls: dict[ServerInfo, set[asyncio.Future]] = defaultdict(set)
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        """Let no more requests pass until `open`. Requests in flight continue."""
        self._open.clear()

    async def drain(self) -> int:
        """Wait until nothing is in flight, and return how many requests were. Close it first."""
        drained = self.in_flight
        await self._idle.wait()
        return drained

    async def send(
        self, server: ServerInfo, input_ids: np.ndarray, params: SamplingParams, rid: str
    ) -> GenerationChunk:
        """Send one request when the gate is open, and return the tokens that it generated.

        Raises ServerNotReady if `server` is not ready by then, ServerFailed for tokens of a version
        that it cannot have, and what Client.generate raises.
        """
        # In a loop: the gate may close again between the wake-up of this task and its turn.
        while not self._open.is_set():
            await self._open.wait()
        if not self._router.is_ready(server):
            raise ServerNotReady(server, "was withdrawn or has other weights than the trainer")
        self._counts["requests"] += 1
        self.in_flight += 1
        self._idle.clear()
        # After a push in mode `in_place` the cache still holds prefixes that older weights
        # computed. The key keeps them from this request. A push that finds the request in the
        # server's queue makes it start under the new weights, but over the old prefixes.
        version = self._router.version
        try:
            cache_key = f"{self._run_id}-{version}"
            call = self._client.generate(server, input_ids, params, rid, cache_key)
            chunk = await self._unless_failed(server, call)
            check_versions(chunk, version, self._router.newest_version)
        except ValueError as error:
            raise ServerFailed(server, f"/generate ({rid}): {error}") from error
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
        self._counts["aborts"] += chunk.finish_reason == "abort"
        return replace(chunk, kv_version=version)

    async def _unless_failed(
        self, server: ServerInfo, call: Coroutine[Any, Any, GenerationChunk]
    ) -> GenerationChunk:
        """Return the result of `call`. Raises ServerFailed as soon as `server` has failed."""
        request = asyncio.ensure_future(call)
        self._calls[server].add(request)
        try:
            return await request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller was cancelled, not the request
            raise ServerFailed(server, f"was left out: {self.last_failure}") from None
        finally:
            self._calls[server].discard(request)
            if not self._calls[server]:
                del self._calls[server]

    async def vacate(self, server: ServerInfo) -> None:
        """Abort all requests on `server`, which must not be ready. They continue elsewhere.

        If the server fails meanwhile, its health check finds out.
        """
        with suppress(ServerError):
            # Again and again: a request may reach the server after an abort.
            while calls := self._calls.get(server):
                await self._client.abort_all(server)
                await asyncio.wait(calls, timeout=_ABORT_AGAIN_S)

    def in_flight_on(self, server: ServerInfo) -> int:
        return len(self._calls.get(server, ()))

    def cancel(self, error: ServerError) -> None:
        """End all requests on the server of `error`."""
        self.last_failure = error
        for request in self._calls.pop(error.server, ()):
            request.cancel()
