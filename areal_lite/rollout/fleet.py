"""The servers as one: send a completion to the least loaded one, move it when its server fails, hold everything for a push.

A completion is never lost with a server: it waits until another one is ready, and continues from its last known token.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from areal_lite.rollout.generate import Client, Completion, Piece, SamplingParams, ServerFailed, generate
from areal_lite.rollout.router import Router
from areal_lite.rollout.server import ServerInfo

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5


class Fleet:
    """`announced()` returns the servers that are up. `version` is the one that the trainer last pushed; `on_change` is called when servers
    come or go. `counts`: requests sent, aborts (requests that came back unfinished), retries (requests whose server failed)."""

    def __init__(self, client: Client, announced: Callable[[], list[ServerInfo]], on_change: Callable[[], None]):
        self._client, self._announced, self._on_change = client, announced, on_change
        self.router = Router()
        self.version = 0
        self.in_flight = 0  # requests
        self.counts: Counter[str] = Counter()
        self.last_failure: ServerFailed | None = None
        self._requests: defaultdict[ServerInfo, set[asyncio.Future[Piece]]] = defaultdict(set)
        self._resume = asyncio.Event()
        self._resume.set()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._run = secrets.token_hex(4)  # request ids must not meet those of an earlier controller on the same servers

    async def watch(self) -> None:
        """Runs until cancelled: servers join when they are announced."""
        while True:
            for server in self.router.announce(self._announced()):
                await self._join(server)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _join(self, server: ServerInfo) -> None:
        try:
            version = await self._client.weight_version(server)
        except ServerFailed as error:
            self._fail(error)
            return
        if version == self.version:
            self.router.mark_ready(server)
            log.info("server %s (%s) joined at version %d", server.name, server.url, version)
            self._ready.set()
        else:
            log.info("server %s (%s) has version %d, not %d: it waits for the next push", server.name, server.url, version, self.version)
        self._on_change()

    async def reserve(self, count: int) -> ServerInfo:
        """The least loaded server, with `count` more trajectories on it from now on; waits until one is ready."""
        while (server := self.router.pick()) is None:
            self._ready.clear()
            await self._ready.wait()
        self.router.load[server.name] += count
        return server

    async def complete(self, prompt: np.ndarray, params: SamplingParams, rid: str, server: ServerInfo) -> Completion:
        """A finished completion of `prompt`, begun on `server`, on which the caller has reserved a place: it is given back."""
        completion = Completion()
        while True:
            try:
                return await generate(self._request, server, prompt, params, f"{self._run}-{rid}", completion, self._resume)
            except ServerFailed as error:
                self.counts["retries"] += 1
                self._fail(error)
            finally:
                self.router.load[server.name] -= 1
            server = await self.reserve(1)

    async def _request(self, server: ServerInfo, input_ids: np.ndarray, params: SamplingParams, rid: str) -> Piece:
        self.counts["requests"] += 1
        self.in_flight += 1
        self._idle.clear()
        try:
            # A prefix that an older version computed must not serve this request: after a push in_place the cache still holds them.
            piece = await self._unless_failed(server, self._client.request(server, input_ids, params, rid, str(self.version)))
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
        self.counts["aborts"] += piece.finish_reason == "abort"
        return piece

    async def _unless_failed(self, server: ServerInfo, call: Coroutine[Any, Any, Piece]) -> Piece:
        """The result of `call`, or ServerFailed as soon as `server` is known to have failed: one request finds out for all."""
        request = asyncio.ensure_future(call)
        self._requests[server].add(request)
        try:
            return await request
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise  # it is we who are cancelled
            raise ServerFailed(server, f"was left out: {self.last_failure}") from None
        finally:
            self._requests[server].discard(request)

    def _fail(self, error: ServerFailed) -> None:
        if self.router.fail(error.server):
            self.last_failure = error
            for request in self._requests.pop(error.server, ()):
                request.cancel()
            log.error("%s: left out until it is announced again; %d servers are left", error, len(self.router.servers))
            self._on_change()

    def hold(self) -> None:
        """Send nothing until `resume`."""
        self._resume.clear()

    async def drain(self) -> int:
        """Wait until nothing is in flight; returns how many requests were. Call `hold` first."""
        drained = self.in_flight
        await self._idle.wait()
        return drained

    def resume(self, version: int, pushed: list[ServerInfo], failed: list[str]) -> None:
        """The servers `pushed`, but for those named in `failed`, have `version`: only they take requests from now on."""
        self.version = version
        self.router.ready.clear()
        for server in pushed:
            if server.name in failed:
                self._fail(ServerFailed(server, f"did not take version {version}"))
            else:
                self.router.mark_ready(server)
        if self.router.ready:
            self._ready.set()
        self._resume.set()

    async def abort_all(self) -> None:
        """End what runs on the servers, as the run is over; one that is gone already is as good."""
        results = await asyncio.gather(*(self._client.abort_all(s) for s in self.router.servers.values()), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, ServerFailed):
                raise error
