"""The HTTP client of SGLang servers, and the errors that calls to servers raise.

    ServerError
    ├── ServerNotReady
    ├── ServerRefused
    └── ServerFailed
        └── ServerUnreachable

    ServersFailed

`SGLangClient` is the only code that talks HTTP to a server. `servers/blocking.py` offers the same
calls to threads that have no event loop.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import aiohttp
import msgspec
import numpy as np

from areal_lite.servers.answers import ServerLoad, parse_generation, parse_load, parse_version
from areal_lite.servers.completion import GenerationChunk, SamplingParams
from areal_lite.servers.registry import ServerInfo


class ServerError(RuntimeError):
    """A call to `server` did not succeed."""

    def __init__(self, server: ServerInfo, reason: str):
        super().__init__(f"{server}: {reason}")
        self.server = server


class ServerNotReady(ServerError):
    """The server takes no requests now, and nothing is wrong with it."""


class ServerRefused(ServerError):
    """The server rejected the call (status 4xx, or `success: false`), as another one would."""


class ServerFailed(ServerError):
    """The server cannot go on. The request can continue on another server."""


class ServerUnreachable(ServerFailed):
    """The server did not answer in time, or not at all."""


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

        Requests share cached prefixes only with requests of the same `cache_key`. Raises also
        ValueError, for an answer that breaks the contract.
        """
        ...

    async def weight_version(self, server: ServerInfo) -> int: ...

    async def check_health(self, server: ServerInfo) -> None:
        """Return if every part of the server works, busy or idle. Raises ServerError in time."""
        ...

    async def load(self, server: ServerInfo) -> ServerLoad: ...

    async def abort_all(self, server: ServerInfo) -> None:
        """End all requests of the server."""
        ...

    async def close(self) -> None: ...


class SGLangClient:
    """The client of all SGLang servers, over one aiohttp session: close it after use.

    A completion may take any time. Other calls end within `timeout_s`, unless they are given
    another time-out.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        # uvicorn closes a connection after 5 idle seconds, perhaps just as a request is sent on
        # it. The client closes idle connections earlier.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # proxies in the environment are for other traffic
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
        }
        body = {
            "rid": rid,
            "input_ids": input_ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "extra_key": cache_key,
        }
        unbounded = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)
        raw = await self._send(server, "/generate", body, unbounded)
        try:
            chunk = parse_generation(raw)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ValueError(
                f"{server}: the answer to request {rid} is invalid: {error};"
                f" it begins with {raw[:200]!r}"
            ) from error
        if len(chunk.tokens) > params.max_new_tokens:
            raise ValueError(
                f"{server}: {len(chunk.tokens)} tokens for request {rid},"
                f" which asked for at most {params.max_new_tokens}"
            )
        return chunk

    async def weight_version(self, server: ServerInfo) -> int:
        answer = msgspec.json.decode(await self._send(server, "/model_info"))
        try:
            return parse_version(answer["weight_version"])
        except ValueError as error:
            raise ValueError(f"{server}: {error}") from error

    async def check_reachable(self, server: ServerInfo, timeout_s: float | None = None) -> None:
        """Return if the HTTP process of the server works."""
        await self._send(server, "/health", timeout=self._bounded(timeout_s))

    async def check_health(self, server: ServerInfo) -> None:
        # /health and /model_info are answered even when the scheduler hangs. /server_info is the
        # only call without side effects that the scheduler answers between any two steps.
        await self._send(server, "/server_info")

    async def load(self, server: ServerInfo) -> ServerLoad:
        return parse_load(await self._send(server, "/v1/loads?include=core"))

    async def abort_all(self, server: ServerInfo) -> None:
        await self.post(server, "/abort_request", {"abort_all": True})

    async def post(
        self, server: ServerInfo, path: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> Any:
        """POST `body` as JSON and return the decoded answer (None if it is empty)."""
        raw = await self._send(server, path, body, self._bounded(timeout_s))
        try:
            answer = json.loads(raw) if raw else None
        except ValueError:
            return raw.decode(errors="replace")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerRefused(server, f"{path}: {answer.get('message')}")
        return answer

    def _bounded(self, timeout_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)

    async def _send(
        self,
        server: ServerInfo,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> bytes:
        """POST `body`, or GET without one, and return the body of a 200."""
        headers = {"Content-Type": "application/json"}
        timeout = timeout or self._bounded(None)
        if server.api_key:
            headers["Authorization"] = f"Bearer {server.api_key}"
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                server.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=timeout,
            ) as response:
                raw = await response.read()
        except TimeoutError as error:
            limit_s = timeout.total or timeout.sock_connect
            reason = f"no answer to {path} within {limit_s:g} s"
            raise ServerUnreachable(server, reason) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{path}: {type(error).__name__} {error}"
            raise ServerUnreachable(server, reason) from error
        if response.status == 200:
            return raw
        reason = f"{path} answered {response.status}: {raw[:500].decode(errors='replace')}"
        raise (ServerFailed if response.status >= 500 else ServerRefused)(server, reason)
