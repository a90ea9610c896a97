"""The servers as one: send a completion to the least loaded one, move it when its server fails, hold everything for a push.

A completion is never lost with a server: it waits until another one is ready, and continues from its last known token. Whether a server
has failed is for its health check to say, which the server's own scheduler must answer, or for its connection; a slow answer says nothing.
A server that failed is marked unhealthy: whoever started it is told, to end it and start another.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from areal_lite.servers.client import Client, ServerFailed, ServerNotReady
from areal_lite.servers.completion import Completion, GenerationChunk, SamplingParams
from areal_lite.servers.generate import generate
from areal_lite.servers.registry import ServerInfo
from areal_lite.servers.router import Router

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5


class Fleet:
    """`announced()` returns the servers that are up, `mark_unhealthy(server, reason)` tells who started one that it has failed; `on_change` is
    called when servers come or go. `counts`: requests sent, aborts (requests that came back unfinished), retries (requests whose server
    failed or stopped taking them)."""

    def __init__(
        self,
        client: Client,
        announced: Callable[[], list[ServerInfo]],
        on_change: Callable[[], None],
        mark_unhealthy: Callable[[ServerInfo, str], None] = lambda server, reason: None,
        health_interval_s: float = 5.0,
    ):
        self._client, self._announced, self._on_change, self._mark_unhealthy = (
            client,
            announced,
            on_change,
            mark_unhealthy,
        )
        self._health_interval_s = health_interval_s
        self.router = Router()
        self.in_flight = 0  # requests
        self.counts: Counter[str] = Counter()
        self.last_failure: ServerFailed | None = None
        self._waiting = 0  # calls of `reserve`
        self._requests: defaultdict[ServerInfo, set[asyncio.Future[GenerationChunk]]] = defaultdict(
            set
        )
        self._prefixes: Counter[tuple[ServerInfo, bytes]] = (
            Counter()
        )  # completions in the making, by where and of which prompt
        self._pushing: list[ServerInfo] = []
        self._pushes = 0  # begun and ended
        self._dispatching = asyncio.Event()
        self._dispatching.set()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._run = secrets.token_hex(
            4
        )  # request ids must not meet those of an earlier controller on the same servers

    @property
    def version(self) -> int:
        """The one that the trainer last pushed."""
        return self.router.version

    @property
    def no_ready_server(self) -> bool:
        """Something waits for a server, and none is ready."""
        return self._waiting > 0 and not self.router.ready

    async def watch(self) -> None:
        """Runs until cancelled: servers join when they are announced, and are looked after until they are gone."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for server in self.router.update_servers(self._announced()):
                    tasks.create_task(self._monitor(server))
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _monitor(self, server: ServerInfo) -> None:
        try:
            await self._join(server)
            # One that was withdrawn finishes what it has.
            while self.router.servers.get(server.name) == server or server in self._requests:
                await asyncio.sleep(self._health_interval_s)
                await self._check(server)
        except ServerFailed as error:
            self._fail(error)

    async def _join(self, server: ServerInfo) -> None:
        version = await self._client.weight_version(server)
        self.router.record_version(server, version)
        if self.router.is_ready(server):
            log.info("server %s (%s) joined at version %d", server.name, server.url, self.version)
            self._ready.set()
        else:
            log.info(
                "server %s (%s) has version %d, not %d: it waits for the next push",
                server.name,
                server.url,
                version,
                self.version,
            )
        self._on_change()

    async def _check(self, server: ServerInfo) -> None:
        """Raises ServerFailed. While weights come in, a server answers nothing else: a push has a time-out of its own."""
        pushes = self._pushes
        try:
            if server not in self._pushing:
                await self._client.check_health(server)
        except ServerFailed:
            if pushes == self._pushes:
                raise

    async def reserve(self, count: int, prefer: Iterable[ServerInfo] = ()) -> ServerInfo:
        """The least loaded server among `prefer` if one of them works, else among all, with `count` more trajectories on it from now on;
        waits until one is ready."""
        while (server := self.router.choose(prefer)) is None:
            self._ready.clear()
            self._waiting += 1
            try:
                await self._ready.wait()
            finally:
                self._waiting -= 1
        self.router.load[server.name] += count
        return server

    async def complete(
        self, prompt: np.ndarray, params: SamplingParams, rid: str, server: ServerInfo
    ) -> Completion:
        """A finished completion of `prompt`, begun on `server`, on which the caller has reserved a place: it is given back.

        If it has to move, it goes to where others of its group are.
        """
        completion, prefix = Completion(), prompt.tobytes()
        while True:
            self._prefixes[server, prefix] += 1
            try:
                return await generate(
                    self._request,
                    server,
                    prompt,
                    params,
                    f"{self._run}-{rid}",
                    completion,
                    self._dispatching,
                )
            except ServerNotReady:
                self.counts["retries"] += 1
            except ServerFailed as error:
                self.counts["retries"] += 1
                self._fail(error)
            finally:
                self.router.load[server.name] -= 1
                self._prefixes[server, prefix] -= 1
                if not self._prefixes[server, prefix]:
                    del self._prefixes[server, prefix]
            server = await self.reserve(
                1, [s for s in self.router.servers.values() if self._prefixes[s, prefix]]
            )

    async def _request(
        self, server: ServerInfo, input_ids: np.ndarray, params: SamplingParams, rid: str
    ) -> GenerationChunk:
        if not self.router.is_ready(server):
            raise ServerNotReady(server, "was withdrawn or has other weights than the trainer")
        self.counts["requests"] += 1
        self.in_flight += 1
        self._idle.clear()
        try:
            # A prefix that an older version computed must not serve this request: after a push in_place the cache still holds them. One
            # that a push in_place finds in the server's queue begins under the new weights, and over what the old ones have cached.
            version = self.version
            chunk = await self._unless_failed(
                server, self._client.generate(server, input_ids, params, rid, str(version))
            )
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
        self.counts["aborts"] += chunk.finish_reason == "abort"
        return replace(chunk, kv_version=version)

    async def _unless_failed(
        self, server: ServerInfo, call: Coroutine[Any, Any, GenerationChunk]
    ) -> GenerationChunk:
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
            if not self._requests[server]:
                del self._requests[server]

    def _fail(self, error: ServerFailed) -> None:
        """Leave its server out, move what runs on it, and have it replaced."""
        news = self.router.mark_failed(error.server)
        if not news and error.server not in self._requests:
            return
        self.last_failure = error
        for request in self._requests.pop(error.server, ()):
            request.cancel()
        self._mark_unhealthy(error.server, str(error))
        log.error(
            "%s: left out until it is announced again; %d servers are left",
            error,
            len(self.router.servers),
        )
        self._on_change()

    def pause_dispatch(self) -> None:
        """Send nothing until `finish_push`."""
        self._dispatching.clear()

    async def drain(self) -> int:
        """Wait until nothing is in flight; returns how many requests were. Call `pause_dispatch` first."""
        drained = self.in_flight
        await self._idle.wait()
        return drained

    def begin_push(self, servers: list[ServerInfo]) -> None:
        """From now on `servers` get weights; call `finish_push` when it is over."""
        self._pushing = servers
        self._pushes += 1

    def finish_push(self, version: int, failed: list[str]) -> None:
        """The servers of the push, but for those named in `failed`, have `version`. Only who has it takes requests from now on."""
        self.router.version = version
        pushed, self._pushing = self._pushing, []
        self._pushes += 1
        for server in pushed:
            if server.name in failed:
                self._fail(ServerFailed(server, f"did not take version {version}"))
            else:
                self.router.record_push(server)
        if self.router.ready:
            self._ready.set()
        self._dispatching.set()

    async def abort_all(self) -> None:
        """End what runs on the servers, as the run is over; one that is gone already is as good."""
        results = await asyncio.gather(
            *(self._client.abort_all(s) for s in self.router.servers.values()),
            return_exceptions=True,
        )
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, ServerFailed):
                raise error
