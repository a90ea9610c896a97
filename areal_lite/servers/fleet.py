"""The servers as one: choose a server for each completion, and move it when that server fails.

    Transcript -> Fleet (chooses servers) -> RequestGate (one completion) -> SGLangClient

* A server that has failed (docs/servers.md, Servers that come and go) is marked unhealthy, so that
  the process that started it replaces it.
* A completion is made of as many requests as it takes. After an abort (a push in mode `abort`) or
  the failure of its server, the prompt and the tokens so far are sent again with the rest of the
  budget. Each token carries the version that the *server* reports for it
  (`meta_info.weight_versions`, SGLang >= 0.5.19) and its log-probability under that version.
* A token's route is that of the forward pass that sampled the next token. A request that is sent
  again computes its prefix once more, perhaps with other routes: only routes of tokens after the
  known ones are asked for.
"""

import asyncio
import hashlib
import logging
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.config import SyncConfig
from areal_lite.servers import registry
from areal_lite.servers.client import (
    ConnectionLost,
    GenerationChunk,
    SamplingParams,
    ServerError,
    ServerFailed,
    ServerNotReady,
    ServerRefused,
    ServerUnreachable,
    SGLangClient,
)
from areal_lite.servers.registry import UNTRUSTED, Router, ServerInfo


@dataclass(slots=True)
class Completion:
    """A completion in progress."""

    chunks: list[GenerationChunk] = field(default_factory=list)
    requests: int = 0  # that were sent for it
    finish_reason: str = "abort"  # until it has ended with `stop` or `length`

    @property
    def tokens(self) -> np.ndarray:
        """Return the tokens of all chunks, int32 [n]."""
        return np.concatenate([np.empty(0, np.int32), *(c.tokens for c in self.chunks)])

    @property
    def logprobs(self) -> np.ndarray:
        """Return the log-prob of each token, float32 [n]."""
        return np.concatenate([np.empty(0, np.float32), *(c.logprobs for c in self.chunks)])

    @property
    def versions(self) -> np.ndarray:
        """Return the weight version of each token, int32 [n]."""
        return np.concatenate([np.empty(0, np.int32), *(c.versions for c in self.chunks)])

    @property
    def routes(self) -> np.ndarray | None:
        """Return the routes of all chunks, [r, layers, top_k], or None if no chunk has any."""
        known = [c.routes for c in self.chunks if c.routes is not None]
        return np.concatenate(known) if known else None


@dataclass(slots=True)
class Session:
    """One episode, whose turns go to the server that holds their prefix, if that is ready."""

    rid: str  # the start of its requests' ids
    server: ServerInfo  # of its last turn
    reserved: bool = True  # before the first turn
    turns: int = 0
    holders: list[ServerInfo] = field(default_factory=list)  # of the prompt, known to its group


def request_seed(run_seed: int, request: str) -> int:
    """Return the seed of a request by its name within the run: 63 bits, the same in every release.

    A server with `server.deterministic` hashes the seed with the position in the sequence and the
    token (MurmurHash3, `multinomial_with_seed` in SGLang): a request that continues elsewhere
    continues the same stream of random numbers. Without that setting SGLang ignores the seed.
    """
    digest = hashlib.blake2b(f"{run_seed}/{request}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(eq=False, repr=False)
class RequestGate:
    """Every request to a server passes through this gate: when it is open, to ready servers.

    When a server fails, all requests on it end at once: one of them, or a health check, finds out
    for all. `counts` counts `requests` (sent) and `aborts` (requests that came back unfinished).
    """

    client: SGLangClient
    router: Router
    counts: Counter[str]
    run_id: str  # tells this controller from earlier ones on the same servers
    in_flight: int = 0
    last_failure: ServerError | None = None
    _calls: dict[ServerInfo, set[asyncio.Future]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

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

    async def generate(
        self,
        server: ServerInfo,
        prompt: np.ndarray,
        params: SamplingParams,
        rid: str,
        completion: Completion,
    ) -> None:
        """Continue `completion` of `prompt` (int32 [n]) on `server` until it ends.

        Raises ServerNotReady if `server` is not ready, ServerFailed for tokens of a version that it
        cannot have, and what SGLangClient.generate raises. `completion` then holds what is known:
        call again with another server. The budget of `params` counts from the start of the
        completion. Ids of requests begin with `rid`.
        """
        empty_aborts = 0
        while completion.finish_reason == "abort":
            sequence, left = rest_of(prompt, params, completion)
            completion.requests += 1
            # In a loop: the gate may close again between the wake-up of this task and its turn.
            while not self._open.is_set():
                await self._open.wait()
            # After a push in mode `in_place` the cache still holds prefixes that older weights
            # computed. The key keeps them from this request. A push that finds the request in the
            # server's queue makes it start under the new weights, but over the old prefixes.
            version = self.router.version
            name, key = f"{rid}-{completion.requests}", f"{self.run_id}-{version}"
            call = partial(self.client.generate, server, sequence, left, name, key)
            with self._sending(server, call) as answer:
                chunk = await answer
            newest = max(self.router.version, self.router.pushing)
            _check_versions(server, name, chunk, version, newest)
            self.counts["aborts"] += chunk.finish_reason == "abort"
            chunk = _until_its_end(chunk, left)
            if len(chunk.tokens):
                completion.chunks.append(replace(chunk, kv_version=version))
            completion.finish_reason = chunk.finish_reason
            # A paused server holds requests, so sending again does not spin. A late abort without a
            # token may come once after an interruption is over.
            is_open = self._open.is_set()
            empty_aborts = empty_aborts + 1 if is_open and not len(chunk.tokens) else 0
            if empty_aborts > 1:
                raise ServerFailed(server, "aborts requests that nothing has interrupted")

    @contextmanager
    def _sending(
        self, server: ServerInfo, call: Callable[[], Coroutine[Any, Any, GenerationChunk]]
    ) -> Iterator[asyncio.Task[GenerationChunk]]:
        """Start `call`, count it as in flight, and let `cancel` end it: then it is a ServerFailed.

        Raises ServerNotReady.
        """
        if not self.router.is_ready(server):
            raise ServerNotReady(server, "was withdrawn or has other weights than the trainer")
        self.counts["requests"] += 1
        self.in_flight += 1
        self._idle.clear()
        request = asyncio.create_task(call())
        self._calls[server].add(request)
        try:
            yield request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller was cancelled, not the request
            raise ServerFailed(server, f"was left out: {self.last_failure}") from None
        finally:
            self._calls[server].discard(request)
            if not self._calls[server]:
                del self._calls[server]
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def in_flight_on(self, server: ServerInfo) -> int:
        return len(self._calls.get(server, ()))

    def cancel(self, error: ServerError) -> None:
        """End all requests on the server of `error`."""
        self.last_failure = error
        for request in self._calls.pop(error.server, ()):
            request.cancel()


def rest_of(
    prompt: np.ndarray, params: SamplingParams, completion: Completion
) -> tuple[np.ndarray, SamplingParams]:
    """Return the tokens so far, `prompt` included, and the parameters of the rest."""
    if not completion.chunks:
        return prompt, params
    tokens, routes = completion.tokens, completion.routes
    left = replace(
        params,
        max_new_tokens=params.max_new_tokens - len(tokens),
        first_route=params.first_route + (0 if routes is None else len(routes)),
    )
    return np.concatenate([prompt, tokens]), left


def _until_its_end(chunk: GenerationChunk, params: SamplingParams) -> GenerationChunk:
    """Cut an aborted request after its first stop token or at its limit, and correct its reason.

    It runs one more decoding step, which has several tokens with speculation. The server does not
    check whether that step ended the sequence.
    """
    if chunk.finish_reason != "abort":
        return chunk
    limit = params.max_new_tokens
    stops = np.flatnonzero(np.isin(chunk.tokens[:limit], params.stop_token_ids))
    count = int(stops[0]) + 1 if len(stops) else min(len(chunk.tokens), limit)
    more, routes = len(chunk.tokens) - count, chunk.routes
    reason = "length" if count == limit else "abort"
    return replace(
        chunk,
        tokens=chunk.tokens[:count],
        logprobs=chunk.logprobs[:count],
        versions=chunk.versions[:count],
        finish_reason="stop" if len(stops) else reason,
        routes=None if routes is None else routes[: len(routes) - more],
    )


def _check_versions(
    server: ServerInfo, request: str, chunk: GenerationChunk, oldest: int, newest: int
) -> None:
    """Raise ServerFailed unless the versions of tokens are within [`oldest`, `newest`]."""
    versions = chunk.versions  # they never decrease
    if len(versions) and (versions[0] < oldest or versions[-1] > newest):
        raise ServerFailed(
            server,
            f"/generate ({request}): tokens of weight versions {versions[0]} to {versions[-1]}: "
            f"only {oldest} to {newest} are possible",
        )


log = logging.getLogger(__name__)
_WATCH_EVERY_S = 0.5


@dataclass(eq=False, repr=False)
class Fleet:
    """The servers of a run.

    `counts` counts `retries` (requests whose server failed or was not ready), and what
    RequestGate counts. `mark_unhealthy` is called with a server that has failed and the reason.
    """

    client: SGLangClient
    announced: Callable[[], list[ServerInfo]]  # returns the servers that are up
    on_change: Callable[[], None]  # is called when servers come or go
    mark_unhealthy: Callable[[ServerInfo, str], None] = lambda server, reason: None
    health_interval_s: float = 5.0
    seed: int = 0  # of the run
    router: Router = field(default_factory=Router)
    counts: Counter[str] = field(default_factory=Counter)
    taken_over: set[ServerInfo] = field(default_factory=set)  # an earlier controller used them
    # Request ids must differ from those of an earlier controller on the same servers. So must the
    # keys of their caches: the same version may have had other weights.
    _run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    _waiting: int = 0  # calls of `reserve` that wait
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _pushing: list[ServerInfo] = field(default_factory=list)
    _push_changes: int = 0  # pushes that began or ended

    def __post_init__(self) -> None:
        self.gate = RequestGate(self.client, self.router, self.counts, self._run_id)

    @property
    def no_ready_server(self) -> bool:
        """Return whether a trajectory waits for a server while none is ready."""
        return self._waiting > 0 and not self.router.ready

    async def take_over(self, trainer_runs: bool = False, pushing: bool = False) -> None:
        """Take over the servers that an earlier controller has used. Call it before `watch`.

        Their requests end. They count as stale, because a push may have ended in its middle, and a
        trainer that goes back to a checkpoint gives other weights the same version. If the trainer
        runs, it ends its push itself, and without one the servers have what they report.
        """
        servers = self.announced()
        end_requests = self.client.abort_all if trainer_runs else self.client.reset
        if pushing or not trainer_runs:
            self.taken_over = set(servers)
        for error in await _errors(end_requests, servers):
            self.router.mark_failed(error.server)
            self.mark_unhealthy(error.server, str(error))
            log.error("%s: left out until it is announced again", error)

    async def watch(self) -> None:
        """Monitor every server from its announcement until it is gone. Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for server in self.router.update_servers(self.announced()):
                    tasks.create_task(self._monitor(server))
                await asyncio.sleep(_WATCH_EVERY_S)

    async def _monitor(self, server: ServerInfo) -> None:
        try:
            await self._join(server)
            # A server that was withdrawn finishes the requests that it has.
            while self.router.servers.get(server.name) == server or self.gate.in_flight_on(server):
                await asyncio.sleep(self.health_interval_s)
                await self._check_health(server)
        except ServerError as error:
            self._fail(error)

    async def _join(self, server: ServerInfo) -> None:
        """Ask `server` for its version, and let it take requests if that is the trainer's."""
        version = await self.client.weight_version(server)
        if server in self.taken_over:
            version = UNTRUSTED  # whatever version it reports
        self.router.record_version(server, version)
        current = self.router.version
        if self.router.is_ready(server):
            log.info("%s joined at version %d", server, current)
            self._ready.set()
        else:
            found = "unknown weights" if version == UNTRUSTED else f"version {version}"
            log.info("%s has %s, not %d: it waits for the next push", server, found, current)
        self.on_change()

    async def _check_health(self, server: ServerInfo) -> None:
        # A server that takes weights answers nothing else, and a push has a time-out of its own. A
        # wrong answer counts at any time.
        changes = self._push_changes
        try:
            if server not in self._pushing:
                await self.client.check_health(server)
        except ServerUnreachable:
            if changes == self._push_changes:
                raise

    async def place(self, samples: int) -> list[ServerInfo]:
        """Reserve a server for each sample of a group.

        Samples share the cache of their prompt on a server, so they stay together: a server takes
        at most two more than it has. Where groups are few, no server idles beside a whole group.
        """
        servers: list[ServerInfo] = []
        while len(servers) < samples:
            server = await self.reserve()
            part = min(samples - len(servers), self.router.load[server.name] + 1)
            self.router.load[server.name] += part - 1
            servers += [server] * part
        return servers

    async def reserve(self, prefer: Iterable[ServerInfo] = ()) -> ServerInfo:
        """Wait for a ready server, choose one, and count a trajectory as its load."""
        while (server := self.router.choose(prefer)) is None:
            self._ready.clear()
            self._waiting += 1
            try:
                await self._ready.wait()
            finally:
                self._waiting -= 1
        self.router.load[server.name] += 1
        return server

    def release(self, server: ServerInfo) -> None:
        """Give back the reservation of one trajectory on `server`."""
        self.router.load[server.name] -= 1

    async def complete(
        self, session: Session, prompt: np.ndarray, params: SamplingParams
    ) -> Completion:
        """Sample one turn of an episode: a whole completion of `prompt` (int32 [n]).

        If it has to move, it prefers a server to which another sample of its group went: that holds
        the prompt. The first dropped connection is forgiven if the server passes a health check.
        """
        completion = Completion()
        rid = f"{session.rid}-{session.turns}"
        params = replace(params, seed=request_seed(self.seed, rid))
        refusals: dict[ServerInfo, ServerRefused] = {}
        forgiven: set[ServerInfo] = set()
        # Before any wait, in which another turn of the episode may begin.
        reserved, session.reserved, session.turns = session.reserved, False, session.turns + 1
        server = session.server if reserved else await self.reserve([session.server])
        while True:
            session.server = server
            try:
                rid_of_run = f"{self._run_id}-{rid}"
                await self.gate.generate(server, prompt, params, rid_of_run, completion)
                break
            except ServerNotReady:
                pass
            except ServerRefused as error:
                refusals[server] = error
            except ServerFailed as error:
                if server not in forgiven and await self._lost_only_a_connection(error):
                    forgiven.add(server)
                else:
                    self._fail(error)
            finally:
                self.release(server)
            self.counts["retries"] += 1
            server = await self._next_server(refusals, session.holders)
            session.holders.append(server)
        for error in refusals.values():
            self._fail(error)
        return completion

    async def open_session(self, rid: str) -> Session:
        """Wait for a ready server, and open a session on it."""
        return Session(rid, await self.reserve())

    def close_session(self, session: Session) -> None:
        """Give back the reservation of a session without a turn."""
        if session.reserved:
            session.reserved = False
            self.release(session.server)

    async def check(self, server: ServerInfo) -> None:
        """Leave a server out that does not answer a health check."""
        for error in await _errors(self.client.check_health, [server]):
            self._fail(error)

    async def _lost_only_a_connection(self, error: ServerFailed) -> bool:
        """Return whether a request failed with its connection while its server is healthy."""
        if not isinstance(error, ConnectionLost):
            return False
        if await _errors(self.client.check_health, [error.server]):
            return False
        log.warning("%s: the server is healthy, the request is sent again", error)
        return True

    async def _next_server(
        self, refusals: Mapping[ServerInfo, ServerRefused], holders: list[ServerInfo]
    ) -> ServerInfo:
        """Reserve another server, preferably of `holders`. Raises a refusal if all have refused."""
        if not refusals:
            return await self.reserve(holders)
        others = [s for s in self.router.servers.values() if s not in refusals]
        if not any(map(self.router.is_ready, others)):
            raise next(iter(refusals.values()))
        return await self.reserve(others)

    def _fail(self, error: ServerError) -> None:
        """Leave the server of `error` out, move its requests, and have it replaced."""
        was_in_use = self.router.mark_failed(error.server)
        if not was_in_use and not self.gate.in_flight_on(error.server):
            return
        self.gate.cancel(error)
        self.mark_unhealthy(error.server, str(error))
        left = len(self.router.servers)
        log.error("%s: left out until it is announced again; servers left: %d", error, left)
        self.on_change()

    def begin_push(self, version: int, servers: list[ServerInfo]) -> None:
        """Record that `servers` take `version` from now on. `finish_push` ends it."""
        self.router.pushing = version
        self._pushing = servers
        self._push_changes += 1

    def finish_push(self, version: int, failed: list[str]) -> None:
        """Record that every pushed server except `failed` now serves `version`."""
        self.router.version = version
        pushed, self._pushing = self._pushing, []
        self._push_changes += 1
        for server in pushed:
            if server.name in failed:
                self._fail(ServerFailed(server, f"did not take version {version}"))
            else:
                self.router.record_push(server)
        if self.router.ready:
            self._ready.set()
        self.gate.open()

    async def abort_all(self) -> None:
        """End all requests on the servers, of which some may be gone."""
        await _errors(self.client.abort_all, self.router.servers.values())


async def _errors(
    call: Callable[[ServerInfo], Coroutine[Any, Any, None]], servers: Iterable[ServerInfo]
) -> list[ServerError]:
    """Call all servers at once, and return the errors of those that failed."""
    results = await asyncio.gather(*map(call, servers), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ServerError):
            raise result
    return [result for result in results if isinstance(result, ServerError)]


@asynccontextmanager
async def open_fleet(folder: Path, seed: int = 0) -> AsyncIterator[Fleet]:
    """Watch the servers that are announced in `folder` as long as the block runs."""
    client = SGLangClient(SyncConfig().health_timeout_s)
    announced = partial(registry.announced_servers, folder)
    failed = partial(registry.mark_unhealthy, folder)
    fleet = Fleet(client, announced, lambda: None, failed, seed=seed)
    watching = asyncio.create_task(fleet.watch())
    try:
        yield fleet
    finally:
        watching.cancel()
        await client.close()
