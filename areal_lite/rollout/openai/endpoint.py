"""An OpenAI-compatible HTTP endpoint in front of the policy, in the controller's process.

* `POST /v1/chat/completions` and `GET /v1/models`;
* the requests under an episode's API key are its conversations (conversations.py has the rules);
* sampling is the rollout's: `temperature`, if given, must be rollout.temperature, `top_p` 1,
  penalties 0, `n` 1. A greedy evaluation ignores `temperature`;
* `max_tokens`, `max_completion_tokens`, `stop` and `tools` work; any other setting that would
  change the answer is refused by name with status 400.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Iterator

from aiohttp import web

from areal_lite.rollout.episode import Episode
from areal_lite.rollout.openai.connections import Connections
from areal_lite.rollout.openai.conversation import MODEL
from areal_lite.rollout.openai.conversations import Conversations
from areal_lite.rollout.openai.messages import RequestRefused, parse_body

# A request has the whole conversation, as JSON and with the names of its fields.
_BYTES_PER_TOKEN = 64
_OTHER_BYTES = 1 << 20

_BODY_TIMEOUT_S = 30.0


class OpenAIEndpoint:
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
        app.router.add_post("/v1/chat/completions", self._chat)
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
        return self._episodes.get(key)

    async def _models(self, request: web.Request) -> web.Response:
        if self._episode_of(request) is None:
            return _error(401, "no episode has this API key", "invalid_api_key")
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal_lite"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.Response:
        conversations = self._episode_of(request)
        if conversations is None:
            return _error(401, "no episode has this API key (it may be over)", "invalid_api_key")
        # OpenAI's clients count their retries of a request in this header.
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                raw = await request.read()
            _check_charset(request)
            return web.json_response(await conversations.chat(parse_body(raw), is_retry))
        except TimeoutError:
            return _error(408, f"no complete request within {_BODY_TIMEOUT_S:g} s", "timeout")
        except web.HTTPRequestEntityTooLarge as error:
            return _error(413, f"{error.text}: give shorter messages", "request_too_large")
        except RequestRefused as refusal:
            return _error(400, str(refusal), refusal.code)
        except RecursionError:  # the decoder takes deeper values than the rest can handle
            return _error(400, "the request is nested too deeply", "invalid_value")


def _check_charset(request: web.Request) -> None:
    if (charset := request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise RequestRefused(f"charset {charset!r:.100}: JSON is UTF-8", "invalid_json")


def _error(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
