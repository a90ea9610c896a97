"""The HTTP client of SGLang servers, and the errors that calls to servers raise.

    ServerError
    ├── ServerNotReady
    ├── ServerRefused
    └── ServerFailed
        └── ServerUnreachable
            └── ConnectionLost

    ServersFailed

`SGLangClient` is the only code that talks HTTP to a server. `servers/blocking.py` offers the same
calls to threads that have no event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec
import numpy as np

from areal_lite.servers.answers import (
    MAX_ANSWER_BYTES,
    ServerLoad,
    max_generation_bytes,
    parse_generation,
    parse_load,
    parse_model_info,
    parse_reply,
    parse_server_info,
)
from areal_lite.servers.completion import GenerationChunk, SamplingParams
from areal_lite.servers.registry import ServerInfo

T = TypeVar("T")


class ServerError(RuntimeError):
    """A call to `server` did not succeed."""

    def __init__(self, server: ServerInfo, reason: str):
        # The reason may quote the server: no new line in a log, no command for a terminal.
        printable = "".join(c if c.isprintable() else " " for c in reason)
        super().__init__(f"{server}: {printable}")
        self.server = server


class ServerNotReady(ServerError):
    """The server takes no requests now, and nothing is wrong with it."""


class ServerRefused(ServerError):
    """The server rejected the call (status 4xx, or `success: false`), as another one would."""


class ServerFailed(ServerError):
    """The server cannot continue, or gave an answer that it should not.

    The request can continue on another server.
    """


class ServerUnreachable(ServerFailed):
    """The server did not answer in time, or not at all."""


class ConnectionLost(ServerUnreachable):
    """The connection broke before the answer. The server may be as healthy as before."""


class ServersFailed(RuntimeError):
    """A collective operation of servers failed because of the servers in `errors`."""

    def __init__(self, errors: list[ServerError]):
        super().__init__("; ".join(str(error) for error in errors))
        self.errors = errors


class Client(Protocol):
    """The calls that the fleet makes. They raise ServerError. A simulator can implement them."""

    async def generate(
        self,
        server: ServerInfo,
        input_ids: np.ndarray,
        params: SamplingParams,
        rid: str,
        cache_key: str,
    ) -> GenerationChunk:
        """Continue `input_ids` (int32 [n]) and return the new tokens.

        Requests share cached prefixes only with requests of the same `cache_key`.
        """
        ...

    async def weight_version(self, server: ServerInfo) -> int: ...

    async def check_health(self, server: ServerInfo) -> None:
        """Check that every part of the server works, busy or idle. Raises ServerError in time."""
        ...

    async def load(self, server: ServerInfo) -> ServerLoad: ...

    async def abort_all(self, server: ServerInfo) -> None:
        """End all requests of the server."""
        ...

    async def reset(self, server: ServerInfo) -> None:
        """End all requests of the server, and a push that an earlier trainer left open."""
        ...

    async def close(self) -> None: ...


class SGLangClient:
    """The client of all SGLang servers, over one aiohttp session: close it after use.

    * A completion may take any time to begin. Other calls end within `timeout_s`, unless they are
      given another time-out.
    * An answer has a limited size, comes from the server itself (no redirects), and is as it was
      sent (not compressed). Anything but the expected answer is a ServerFailed.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._unbounded = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s)
        # uvicorn closes a connection after 5 idle seconds, perhaps just as a request is sent on
        # it. The client closes idle connections earlier.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # proxies in the environment are for other traffic
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
            "sampling_seed": params.seed,
        }
        body = {
            "rid": rid,
            "input_ids": input_ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "extra_key": cache_key,
        }
        if params.experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": params.first_route}
        max_bytes = max_generation_bytes(params, len(input_ids))
        raw = await self._send(server, "/generate", body, self._unbounded, max_bytes)

        def parsed() -> GenerationChunk:
            parse = partial(parse_generation, params=params, num_input=len(input_ids))
            return _parsed(server, f"/generate ({rid})", raw, parse)

        # Routes are kilobytes for each token: a thread decodes them.
        return await asyncio.to_thread(parsed) if params.experts else parsed()

    async def weight_version(self, server: ServerInfo) -> int:
        raw = await self._send(server, "/model_info")
        return _parsed(server, "/model_info", raw, parse_model_info)

    async def check_reachable(self, server: ServerInfo, timeout_s: float | None = None) -> None:
        """Check that the HTTP process of the server works. Raises ServerError."""
        await self._send(server, "/health", timeout=self._bounded(timeout_s))

    async def check_health(self, server: ServerInfo) -> None:
        # /health and /model_info are answered even when the scheduler hangs. /server_info is the
        # only call without side effects that the scheduler answers between any two steps.
        raw = await self._send(server, "/server_info")
        _parsed(server, "/server_info", raw, parse_server_info)

    async def load(self, server: ServerInfo) -> ServerLoad:
        raw = await self._send(server, "/v1/loads?include=core")
        return _parsed(server, "/v1/loads", raw, parse_load)

    async def abort_all(self, server: ServerInfo) -> None:
        await self.post(server, "/abort_request", {"abort_all": True})

    async def reset(self, server: ServerInfo) -> None:
        await self.abort_all(server)
        with suppress(ServerRefused):  # no push is open
            await self.post(server, "/end_weight_update", {})
        await self.post(server, "/continue_generation", {"torch_empty_cache": False})

    async def post(
        self, server: ServerInfo, path: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> Any:
        """POST `body` as JSON and return the decoded answer (None if it is empty)."""
        raw = await self._send(server, path, body, self._bounded(timeout_s))
        answer = _parsed(server, path, raw, parse_reply)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerRefused(server, f"{path}: {answer.get('message')!s:.500}")
        return answer

    def _bounded(self, timeout_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)

    async def _send(
        self,
        server: ServerInfo,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> bytes:
        """POST `body`, or GET without one, and return the body of a 200.

        A GET is sent again if its connection breaks.
        """
        try:
            return await self._attempt(server, path, body, timeout, max_bytes)
        except ConnectionLost:
            if body is not None:
                raise
        return await self._attempt(server, path, body, timeout, max_bytes)

    async def _attempt(
        self,
        server: ServerInfo,
        path: str,
        body: dict[str, Any] | None,
        timeout: aiohttp.ClientTimeout | None,
        max_bytes: int,
    ) -> bytes:
        headers = {"Content-Type": "application/json"}
        timeout = timeout or self._bounded(None)
        limit_s = timeout.total or self._timeout_s
        if server.api_key:
            headers["Authorization"] = f"Bearer {server.api_key}"
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                server.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.content.is_eof():  # most answers come whole: no timer for them
                    raw = await _read(response, max_bytes)
                else:
                    # The rest of an answer that has begun does not depend on the scheduler.
                    async with asyncio.timeout(limit_s):
                        raw = await _read(response, max_bytes)
        except TimeoutError as error:
            reason = f"no answer to {path} within {limit_s:g} s"
            raise ServerUnreachable(server, reason) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{path}: {type(error).__name__} {error}"
            is_down = isinstance(error, aiohttp.ClientConnectorError)
            raise (ServerUnreachable if is_down else ConnectionLost)(server, reason) from error
        except ValueError as error:
            raise ServerFailed(server, f"{path}: {error}") from error
        if response.status == 200:
            return raw
        reason = f"{path} answered {response.status}: {raw.decode(errors='replace')}"
        refused = 400 <= response.status < 500
        raise (ServerRefused if refused else ServerFailed)(server, reason)


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read the body of a 200, or the beginning of another one.

    Raises ValueError if it is too large or is not said to be JSON.
    """
    if response.status != 200:
        return await response.content.read(500)
    chunks: list[bytes] = []
    left = max_bytes
    async for chunk in response.content.iter_any():
        left -= len(chunk)
        if left < 0:
            raise ValueError(f"the answer has more than {max_bytes} bytes")
        chunks.append(chunk)
    # aiohttp's own word for an answer that does not say what it is.
    expected = ("application/json", "application/octet-stream")
    if chunks and response.content_type not in expected:
        raise ValueError(f"the answer is {response.content_type!r:.100}, not JSON")
    return b"".join(chunks)


def _parsed(server: ServerInfo, what: str, raw: bytes, parse: Callable[[bytes], T]) -> T:
    """Return the parsed answer. Raises ServerFailed for whatever is not the expected one."""
    try:
        return parse(raw)
    except Exception as error:  # decoders raise more than ValueError, such as RecursionError
        kind = type(error).__name__
        reason = f"{what}: not the expected answer: {kind}: {error}; it begins with {raw[:200]!r}"
        raise ServerFailed(server, reason) from error
