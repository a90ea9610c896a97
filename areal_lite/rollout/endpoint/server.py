"""An HTTP endpoint in front of the policy, for agents, in the controller's process.

* `POST /v1/chat/completions` and `GET /v1/models`, as OpenAI's clients ask;
* `POST /v1/messages`, as Anthropic's clients ask;
* the requests under an episode's API key are its conversations (conversations.py has the rules);
* sampling is the rollout's: `temperature`, if given, must be rollout.temperature, `top_p` 1,
  penalties 0, `n` 1. A greedy evaluation ignores `temperature`;
* limits of tokens, texts to stop at, and tools work; any other setting that would change the answer
  is refused by name with status 400.
"""

import asyncio
import contextlib
import resource
import secrets
import time
from collections.abc import Iterator
from functools import partial
from types import ModuleType

from aiohttp import web
from aiohttp.typedefs import Handler

from areal_lite.rollout.endpoint import anthropic, openai
from areal_lite.rollout.endpoint.conversations import Conversations
from areal_lite.rollout.endpoint.messages import MODEL, RequestRefused, parse_body
from areal_lite.rollout.episode import Episode

# The path of each API, and the module that translates it.
_APIS = {"/v1/chat/completions": openai, "/v1/messages": anthropic}

# A request has the whole conversation, as JSON and with the names of its fields.
_BYTES_PER_TOKEN = 64
_OTHER_BYTES = 1 << 20

_BODY_TIMEOUT_S = 30.0


class AgentEndpoint:
    """The HTTP server. `base_url` is known after `start()`; port 0 picks a free one."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self._host = host
        self._port = port
        self._episodes: dict[str, Conversations] = {}
        self._connections: Connections | None = None
        self.base_url = ""

    async def start(self, context_tokens: int = 1 << 15) -> None:
        """Listen. The largest request has room for a conversation of `context_tokens`."""
        app = web.Application(client_max_size=_OTHER_BYTES + _BYTES_PER_TOKEN * context_tokens)
        for path, api in _APIS.items():
            app.router.add_post(path, partial(self._ask, api))
        app.router.add_get("/v1/models", self._models)
        self._connections = Connections(app)
        port = await self._connections.listen(self._host, self._port)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.base_url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        if self._connections:
            await self._connections.close()

    @contextlib.contextmanager
    def conversations(
        self, episode: Episode, max_traces: int = 16
    ) -> Iterator[tuple[str, Conversations]]:
        """Record an episode under a new API key, which is valid inside the block."""
        key = secrets.token_urlsafe(24)
        conversations = self._episodes[key] = Conversations(episode, max_traces)
        try:
            yield key, conversations
        finally:
            del self._episodes[key]

    def _episode_of(self, request: web.Request) -> Conversations | None:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self._episodes.get(request.headers.get("x-api-key", key))

    async def _models(self, request: web.Request) -> web.Response:
        if self._episode_of(request) is None:
            return _refusal(openai, 401, "no episode has this API key", "invalid_api_key")
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal_lite"}
        return web.json_response({"object": "list", "data": [model]})

    async def _ask(self, api: ModuleType, request: web.Request) -> web.Response:
        refusal = partial(_refusal, api)
        conversations = self._episode_of(request)
        if conversations is None:
            return refusal(401, "no episode has this API key (it may be over)", "invalid_api_key")
        # The clients of both APIs count their retries of a request in this header.
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                raw = await request.read()
            _check_charset(request)
            temperature = conversations.episode.params.temperature
            asked = api.parse_request(parse_body(raw), temperature)
            return web.json_response(api.response(await conversations.ask(asked, is_retry)))
        except TimeoutError:
            return refusal(408, f"no complete request within {_BODY_TIMEOUT_S:g} s", "timeout")
        except web.HTTPRequestEntityTooLarge as error:
            return refusal(413, f"{error.text}: give shorter messages", "request_too_large")
        except RequestRefused as error:
            return refusal(400, str(error), error.code)
        except RecursionError:  # the decoder takes deeper values than the rest can handle
            return refusal(400, "the request is nested too deeply", "invalid_value")


def _check_charset(request: web.Request) -> None:
    if (charset := request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise RequestRefused(f"charset {charset!r:.100}: JSON is UTF-8", "invalid_json")


def _refusal(api: ModuleType, status: int, message: str, code: str) -> web.Response:
    return web.json_response(api.error(status, message, code), status=status)


# Between two requests of a connection, and for the headers of one.
_IDLE_S = 15.0
_CHECK_S = 1.0


class Connections:
    """Serves an aiohttp application, and ends connections without a request."""

    def __init__(self, app: web.Application, idle_s: float = _IDLE_S):
        self._idle_s = idle_s
        app.middlewares.append(self._mark_busy)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, auto_decompress=False
        )
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = soft // 2
        # The transports of running requests, and when the others became idle.
        self._busy: set[asyncio.Transport | None] = set()
        self._idle_since: dict[asyncio.Transport | None, float] = {}

    async def listen(self, host: str, port: int) -> int:
        """Serve, and return the port (a free one for 0)."""
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(
            self._accept, host, port, backlog=self._most
        )
        self._watching = asyncio.create_task(self._watch())
        return self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._watching.cancel()
        self._listener.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None
        return server() if len(server.connections) < self._most else _Refused()

    @web.middleware
    async def _mark_busy(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        self._busy.add(transport)
        try:
            return await handler(request)
        finally:
            self._busy.discard(transport)
            self._idle_since[transport] = time.monotonic()

    async def _watch(self) -> None:
        """End idle connections. Runs until cancelled."""
        while True:
            await asyncio.sleep(min(_CHECK_S, self._idle_s))
            now = time.monotonic()
            server = self._runner.server
            assert server is not None
            idle = {connection.transport for connection in server.connections} - self._busy
            self._idle_since = {t: self._idle_since.get(t, now) for t in idle}
            for transport, since in self._idle_since.items():
                if now - since > self._idle_s and transport is not None:
                    transport.abort()


class _Refused(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
