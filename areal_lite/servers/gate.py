"""The requests in flight: sent through one gate, counted, and cancelled when their server fails.

A completion survives interruption: it is made of as many requests as it takes. After an abort (a
push in mode `abort`) and after the failure of a server, the prompt and the tokens so far are sent
again with the rest of the budget, until the sequence has really ended. In the modes `in_place` and
`retract` the server itself continues the request under the new weights. Either way each token
carries the version that the *server* reports for it (`meta_info.weight_versions`, SGLang >=
0.5.19) and its log-probability under that version.

A token's route is that of the forward pass that sampled the next token. When a request is sent
again, the server computes its prefix once more, perhaps with newer weights and other routes. Only
the routes of tokens after the known ones are asked for. A request that was aborted in the queue
brings none: the next request asks for those, too.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np

from areal_lite.servers.client import (
    Client,
    ServerError,
    ServerFailed,
    ServerNotReady,
    check_versions,
)
from areal_lite.servers.completion import Completion, GenerationChunk, SamplingParams
from areal_lite.servers.registry import Router, ServerInfo

_ABORT_AGAIN_S = 1.0


class RequestGate:
    """Every request to a server passes through this gate.

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

    async def generate(
        self,
        server: ServerInfo,
        prompt: np.ndarray,
        params: SamplingParams,
        rid: str,
        completion: Completion,
    ) -> None:
        """Continue `completion` on `server` until it ends.

        Raises ServerNotReady if `server` is not ready, ServerFailed for tokens of a version that it
        cannot have, and what Client.generate raises. `completion` then holds what is known: call
        again with another server.

        Args:
            prompt: int32 [n].
            params: the budget counts from the start of the completion.
            rid: the start of the requests' ids.
        """
        empty_aborts = 0
        while completion.finish_reason == "abort":
            sequence, left = _rest(prompt, params, completion)
            completion.requests += 1
            # In a loop: the gate may close again between the wake-up of this task and its turn.
            while not self._open.is_set():
                await self._open.wait()
            # After a push in mode `in_place` the cache still holds prefixes that older weights
            # computed. The key keeps them from this request. A push that finds the request in the
            # server's queue makes it start under the new weights, but over the old prefixes.
            version = self._router.version
            name, key = f"{rid}-{completion.requests}", f"{self._run_id}-{version}"
            with self._sending(server):
                call = self._client.generate(server, sequence, left, name, key)
                with self._ended_with(server, asyncio.ensure_future(call)) as answer:
                    chunk = await answer
                _check_versions(server, name, chunk, version, self._router.newest_version)
            self._counts["aborts"] += chunk.finish_reason == "abort"
            if len(chunk.tokens):
                completion.chunks.append(replace(chunk, kv_version=version))
            completion.finish_reason = _true_finish_reason(chunk, left)
            # A paused server holds requests, so sending again does not spin. A late abort without a
            # token may come once after an interruption is over.
            empty_aborts = empty_aborts + 1 if self.is_open and not len(chunk.tokens) else 0
            if empty_aborts > 1:
                raise ServerFailed(server, "aborts requests that nothing has interrupted")

    @contextmanager
    def _sending(self, server: ServerInfo) -> Iterator[None]:
        """Count a request to `server` as in flight. Raises ServerNotReady."""
        if not self._router.is_ready(server):
            raise ServerNotReady(server, "was withdrawn or has other weights than the trainer")
        self._counts["requests"] += 1
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    @contextmanager
    def _ended_with(
        self, server: ServerInfo, call: asyncio.Future[GenerationChunk]
    ) -> Iterator[asyncio.Future[GenerationChunk]]:
        """Let `cancel` end `call` as soon as `server` has failed. It raises ServerFailed then."""
        self._calls[server].add(call)
        try:
            yield call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the caller was cancelled, not the request
            raise ServerFailed(server, f"was left out: {self.last_failure}") from None
        finally:
            self._calls[server].discard(call)
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


def _rest(
    prompt: np.ndarray, params: SamplingParams, completion: Completion
) -> tuple[np.ndarray, SamplingParams]:
    """Return the tokens so far, prompt included, and the parameters of what is left to sample."""
    if not completion.chunks:
        return prompt, params
    tokens, routes = completion.tokens, completion.routes
    left = replace(
        params,
        max_new_tokens=params.max_new_tokens - len(tokens),
        first_route=params.first_route + (0 if routes is None else len(routes)),
    )
    return np.concatenate([prompt, tokens]), left


def _true_finish_reason(chunk: GenerationChunk, params: SamplingParams) -> str:
    # An aborted request runs one more decoding step. The server does not check whether that step
    # ended the sequence.
    if chunk.finish_reason == "abort" and len(chunk.tokens):
        if chunk.tokens[-1] in params.stop_token_ids:
            return "stop"
        if len(chunk.tokens) == params.max_new_tokens:
            return "length"
    return chunk.finish_reason


def _check_versions(
    server: ServerInfo, request: str, chunk: GenerationChunk, oldest: int, newest: int
) -> None:
    """Raise ServerFailed if a token's version is not in [oldest, newest]."""
    try:
        check_versions(chunk, oldest, newest)
    except ValueError as error:
        raise ServerFailed(server, f"/generate ({request}): {error}") from error
