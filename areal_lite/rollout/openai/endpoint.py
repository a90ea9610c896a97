"""An OpenAI-compatible HTTP endpoint in front of the policy, in the controller's process.

* `POST /v1/chat/completions` and `GET /v1/models`;
* the requests under an episode's API key are one conversation (conversation.py has its rules);
* sampling is the rollout's: `temperature`, if given, must be rollout.temperature, `top_p` 1,
  penalties 0, `n` 1. A greedy evaluation ignores `temperature`;
* `max_tokens`, `max_completion_tokens`, `stop` and `tools` work; any other setting that would
  change the answer is refused by name with status 400.
"""

import contextlib
import json
import secrets
from collections.abc import Iterator

from aiohttp import web

from areal_lite.rollout.episode import Episode
from areal_lite.rollout.openai.conversation import MODEL, Conversation
from areal_lite.rollout.openai.messages import RequestRefused

_MAX_REQUEST_BYTES = 64 << 20


class OpenAIEndpoint:
    """The HTTP server. `base_url` is known after `start()`; port 0 picks a free one."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self._host = host
        self._port = port
        self._conversations: dict[str, Conversation] = {}
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self.base_url = ""

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        port = self._runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.base_url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    @contextlib.contextmanager
    def conversation(self, episode: Episode) -> Iterator[tuple[str, Conversation]]:
        """Open a conversation under a new API key, which is valid inside the block."""
        key = secrets.token_urlsafe(24)
        conversation = self._conversations[key] = Conversation(episode)
        try:
            yield key, conversation
        finally:
            del self._conversations[key]

    def _conversation_of(self, request: web.Request) -> Conversation | None:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self._conversations.get(key)

    async def _models(self, request: web.Request) -> web.Response:
        if self._conversation_of(request) is None:
            return _error(401, "no episode has this API key", "invalid_api_key")
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal_lite"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.Response:
        conversation = self._conversation_of(request)
        if conversation is None:
            return _error(401, "no episode has this API key (it may be over)", "invalid_api_key")
        # OpenAI's clients count their retries of a request in this header.
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise RequestRefused("the request must be a JSON object", "invalid_json")
            return web.json_response(await conversation.chat(body, is_retry))
        except json.JSONDecodeError as error:
            return _error(400, f"not JSON: {error}", "invalid_json")
        except RequestRefused as refusal:
            return _error(400, str(refusal), refusal.code)


def _error(status: int, message: str, code: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
