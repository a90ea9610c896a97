"""Generation that survives interruption: one completion out of as many requests as it takes.

A request ends with `stop`, `length` or `abort`. After an abort (a weight push in mode `abort`) and after the failure of a server, prompt
and tokens so far are sent again with what is left of the budget, until the sequence has really ended. In modes `in_place` and `retract`
the server keeps the request and goes on under the new weights by itself. Either way each token carries the version that the *server* says
it was sampled from (`meta_info.weight_versions`, SGLang >= 0.5.19), and the log-probability under that version.

Log-probs are of the distribution softmax(logits / temperature), in nats: what SGLang reports at any temperature. It does not renormalise
them for top-p or top-k, so those are not offered: their log-probs would be of another distribution than the one sampled from.
At temperature 0 (greedy) they are those of softmax(logits).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec
import numpy as np

from areal_lite.rollout.concurrency import Load
from areal_lite.rollout.server import ServerInfo


class ServerFailed(RuntimeError):
    """A server is gone, does not answer in time or cannot go on: the request can continue on another one."""

    def __init__(self, server: ServerInfo, reason: str):
        super().__init__(f"server {server.name} ({server.url}): {reason}")
        self.server = server


class NotReady(ServerFailed):
    """A server takes no requests now, and nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy. `stop_token_ids`: the model's end tokens; the one that stops a sequence is part of it, with a log-prob."""

    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(
                f"rollout.max_new_tokens is {self.max_new_tokens}: it must be at least 1"
            )
        if self.temperature < 0:
            raise ValueError(
                f"rollout.temperature is {self.temperature}: it must be 0 (greedy) or more"
            )


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request brought: tokens int32 [n], logprobs float32 [n] (NaN where the server had none), versions int32 [n].

    `kv_version`: the version under which it was sent, the oldest whose cached prefixes may serve it."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    kv_version: int = -1


@dataclass(slots=True)
class Completion:
    """A completion in the making: the pieces so far. `finish_reason` is `abort` until it has ended with `stop` or `length`."""

    pieces: list[Piece] = field(default_factory=list)
    requests: int = 0
    finish_reason: str = "abort"

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]"""
        return np.concatenate([np.empty(0, np.int32), *(p.tokens for p in self.pieces)])

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [n]"""
        return np.concatenate([np.empty(0, np.float32), *(p.logprobs for p in self.pieces)])

    @property
    def versions(self) -> np.ndarray:
        """int32 [n]"""
        return np.concatenate([np.empty(0, np.int32), *(p.versions for p in self.pieces)])


class Client(Protocol):
    """One request to one server. SGLangClient is the real one; a simulator brings its own."""

    async def request(
        self,
        server: ServerInfo,
        input_ids: np.ndarray,
        params: SamplingParams,
        rid: str,
        cache_key: str,
    ) -> Piece:
        """Requests share cached prefixes only with those of the same `cache_key`.

        Raises ServerFailed, or ValueError when the server refuses the request itself."""

    async def weight_version(self, server: ServerInfo) -> int:
        """Raises ServerFailed."""

    async def check(self, server: ServerInfo) -> None:
        """Returns if all of the server works, busy or not; raises ServerFailed otherwise, in bounded time."""

    async def load(self, server: ServerInfo) -> Load:
        """How busy the server is. Raises ServerFailed."""

    async def abort_all(self, server: ServerInfo) -> None:
        """Ends whatever runs on the server. Raises ServerFailed."""

    async def close(self) -> None: ...


Request = Callable[[ServerInfo, np.ndarray, SamplingParams, str], Awaitable[Piece]]


async def generate(
    request: Request,
    server: ServerInfo,
    prompt: np.ndarray,
    params: SamplingParams,
    rid: str,
    so_far: Completion,
    resume: asyncio.Event,
) -> Completion:
    """Continue `so_far` on `server` to its end, and return it. On ServerFailed it holds what is known: call again with another server.

    Nothing is sent while `resume` is clear. A paused server holds requests by itself, so sending again after an abort cannot spin. An
    abort without a token while nothing is interrupted may come once, late, from an interruption that is over; a second one in a row is a
    failure.
    """
    barren = 0
    while so_far.finish_reason == "abort":
        while (
            not resume.is_set()
        ):  # again: it may have been cleared between our being woken and our turn
            await resume.wait()
        tokens = so_far.tokens
        left = SamplingParams(
            params.max_new_tokens - len(tokens), params.temperature, params.stop_token_ids
        )
        so_far.requests += 1
        piece = await request(
            server, np.concatenate([prompt, tokens]), left, f"{rid}-{so_far.requests}"
        )
        if len(piece.tokens):
            so_far.pieces.append(piece)
        so_far.finish_reason = _true_finish(piece, params.stop_token_ids, left.max_new_tokens)
        barren = barren + 1 if resume.is_set() and not len(piece.tokens) else 0
        if barren > 1:
            raise ServerFailed(
                server, "aborts requests before their first token although nothing is interrupted"
            )
    return so_far


def _true_finish(piece: Piece, stop_token_ids: tuple[int, ...], budget: int) -> str:
    """An aborted request runs one more decoding step, and the server does not look whether that one ended the sequence."""
    if piece.finish_reason == "abort" and len(piece.tokens):
        if piece.tokens[-1] in stop_token_ids:
            return "stop"
        if len(piece.tokens) == budget:
            return "length"
    return piece.finish_reason


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    weight_version: str
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta


_ANSWER = msgspec.json.Decoder(_Answer)


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float


class _Loads(msgspec.Struct):
    loads: list[_Load]  # one, as there is one data-parallel rank in a server


_LOADS = msgspec.json.Decoder(_Loads)


def parse_answer(raw: bytes) -> Piece:
    """The body of a 200 from POST /generate with `return_logprob`. Raises ValueError for anything that is not exactly what we expect."""
    meta = _ANSWER.decode(raw).meta_info
    count = len(meta.output_token_logprobs)
    spans = meta.weight_versions
    if spans is None:  # a server before 0.5.19: then one version a request is the only truth
        spans = [_Span(meta.weight_version, 0, count)]
    versions = np.empty(count, np.int32)
    end = 0
    for span in spans:
        if span.start != end or span.end < span.start:
            raise ValueError(
                f"weight version spans with a gap or overlap: {[(s.version, s.start, s.end) for s in spans]}"
            )
        if not span.version.isdecimal():
            raise ValueError(
                f"weight version {span.version!r} is not a step number: start the server with --weight-version 0"
            )
        versions[span.start : span.end] = int(span.version)
        end = span.end
    if end != count:
        raise ValueError(f"{count} log-probs but weight version spans over {end} tokens")
    if meta.finish_reason.type not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {meta.finish_reason.type!r}")
    return Piece(
        tokens=np.array([token for _, token, _ in meta.output_token_logprobs], np.int32),
        logprobs=np.array(
            [np.nan if p is None else p for p, _, _ in meta.output_token_logprobs], np.float32
        ),  # JSON has no NaN
        versions=versions,
        finish_reason=meta.finish_reason.type,
    )


class SGLangClient:
    """HTTP client of SGLang servers, all over one aiohttp session. `await close()` it.

    A completion takes the time that it takes; everything else that is asked of a server has `timeout_s`.
    """

    def __init__(self, timeout_s: float):
        # uvicorn closes a connection idle for 5 s, perhaps just as we send on it: give them up earlier ourselves.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        self._timeout_s = timeout_s
        self._bounded = aiohttp.ClientTimeout(total=timeout_s)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        await self._session.close()

    async def request(
        self,
        server: ServerInfo,
        input_ids: np.ndarray,
        params: SamplingParams,
        rid: str,
        cache_key: str,
    ) -> Piece:
        sampling = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "stop_token_ids": params.stop_token_ids,
            "skip_special_tokens": False,
        }
        body = {
            "rid": rid,
            "input_ids": input_ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "extra_key": cache_key,
        }
        raw = await self._call("POST", server, "/generate", body)
        try:
            piece = parse_answer(raw)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ValueError(
                f"server {server.name} ({server.url}) answered request {rid} with {error}; it began {raw[:200]!r}"
            ) from error
        if len(piece.tokens) > params.max_new_tokens:
            raise ValueError(
                f"server {server.name}: {len(piece.tokens)} tokens for request {rid}, asked for {params.max_new_tokens}"
            )
        return piece

    async def weight_version(self, server: ServerInfo) -> int:
        version = msgspec.json.decode(
            await self._call("GET", server, "/model_info", timeout=self._bounded)
        )["weight_version"]
        if not version.isdecimal():
            raise ValueError(
                f"server {server.name}: weight version {version!r} is not a step number: start it with --weight-version 0"
            )
        return int(version)

    async def check(self, server: ServerInfo) -> None:
        # The one question without a side effect that the scheduler process answers too, between two steps, whatever else it has to do:
        # /health and /model_info are answered in front of a scheduler that hangs.
        await self._call("GET", server, "/server_info", timeout=self._bounded)

    async def load(self, server: ServerInfo) -> Load:
        (load,) = _LOADS.decode(
            await self._call("GET", server, "/v1/loads?include=core", timeout=self._bounded)
        ).loads
        return Load(load.num_running_reqs, load.num_waiting_reqs, load.token_usage)

    async def abort_all(self, server: ServerInfo) -> None:
        await self._call("POST", server, "/abort_request", {"abort_all": True}, self._bounded)

    async def _call(
        self,
        method: str,
        server: ServerInfo,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> bytes:
        headers = {"Content-Type": "application/json"}
        if server.api_key:
            headers["Authorization"] = f"Bearer {server.api_key}"
        data = msgspec.json.encode(body) if body is not None else None
        try:
            async with self._session.request(
                method,
                server.url + path,
                data=data,
                headers=headers,
                timeout=timeout or self._session.timeout,
            ) as response:
                raw = await response.read()
        except TimeoutError as error:
            raise ServerFailed(
                server, f"no answer to {path} within {self._timeout_s:g} s"
            ) from error
        except aiohttp.ClientError as error:
            raise ServerFailed(server, f"{path}: {type(error).__name__} {error}") from error
        if response.status >= 500:
            raise ServerFailed(
                server, f"{path} answered {response.status}: {raw[:300].decode(errors='replace')}"
            )
        if response.status != 200:
            raise ValueError(
                f"server {server.name} refused {path} with {response.status}: {raw[:300].decode(errors='replace')}"
            )
        return raw
