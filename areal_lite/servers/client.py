"""TODO docstring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import msgspec
import numpy as np

from areal_lite.servers.completion import GenerationChunk, SamplingParams
from areal_lite.servers.registry import ServerInfo


class ServerFailed(RuntimeError):
    """A server is gone, does not answer in time or cannot go on: the request can continue on another one."""

    def __init__(self, server: ServerInfo, reason: str):
        super().__init__(f"server {server.name} ({server.url}): {reason}")
        self.server = server


class NotReady(ServerFailed):
    """A server takes no requests now, and nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Of one server: requests that run, requests that wait, and the used share of its KV cache."""

    running: int
    waiting: int
    cache_used: float


class Client(Protocol):
    """One request to one server. SGLangClient is the real one; a simulator brings its own."""

    async def generate(
        self,
        server: ServerInfo,
        input_ids: np.ndarray,
        params: SamplingParams,
        rid: str,
        cache_key: str,
    ) -> GenerationChunk:
        """Requests share cached prefixes only with those of the same `cache_key`.

        Raises ServerFailed, or ValueError when the server refuses the request itself."""

    async def weight_version(self, server: ServerInfo) -> int:
        """Raises ServerFailed."""

    async def check_health(self, server: ServerInfo) -> None:
        """Returns if all of the server works, busy or not; raises ServerFailed otherwise, in bounded time."""

    async def load(self, server: ServerInfo) -> ServerLoad:
        """How busy the server is. Raises ServerFailed."""

    async def abort_all(self, server: ServerInfo) -> None:
        """Ends whatever runs on the server. Raises ServerFailed."""

    async def close(self) -> None: ...


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


def parse_answer(raw: bytes) -> GenerationChunk:
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
    return GenerationChunk(
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

    async def generate(
        self,
        server: ServerInfo,
        input_ids: np.ndarray,
        params: SamplingParams,
        rid: str,
        cache_key: str,
    ) -> GenerationChunk:
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
            chunk = parse_answer(raw)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ValueError(
                f"server {server.name} ({server.url}) answered request {rid} with {error}; it began {raw[:200]!r}"
            ) from error
        if len(chunk.tokens) > params.max_new_tokens:
            raise ValueError(
                f"server {server.name}: {len(chunk.tokens)} tokens for request {rid}, asked for {params.max_new_tokens}"
            )
        return chunk

    async def weight_version(self, server: ServerInfo) -> int:
        version = msgspec.json.decode(
            await self._call("GET", server, "/model_info", timeout=self._bounded)
        )["weight_version"]
        if not version.isdecimal():
            raise ValueError(
                f"server {server.name}: weight version {version!r} is not a step number: start it with --weight-version 0"
            )
        return int(version)

    async def check_health(self, server: ServerInfo) -> None:
        # The one question without a side effect that the scheduler process answers too, between two steps, whatever else it has to do:
        # /health and /model_info are answered in front of a scheduler that hangs.
        await self._call("GET", server, "/server_info", timeout=self._bounded)

    async def load(self, server: ServerInfo) -> ServerLoad:
        (load,) = _LOADS.decode(
            await self._call("GET", server, "/v1/loads?include=core", timeout=self._bounded)
        ).loads
        return ServerLoad(load.num_running_reqs, load.num_waiting_reqs, load.token_usage)

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
