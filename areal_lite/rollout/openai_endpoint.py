"""An OpenAI-compatible endpoint in front of the policy: `POST /v1/chat/completions` and `GET /v1/models`, on the controller.

Every episode has an API key of its own. What is asked under it is one conversation, recorded token by token: the answers as the policy
sampled them, with log-probs and versions, and around them what the chat template makes of the other messages.

The messages of a request must begin with all those of the conversation so far, the policy's answers as they were given (but for white space
around them). They stand for the tokens that were recorded: only messages after them are tokenised, and nothing that was sampled ever is. A
request that begins otherwise (an edited history, a second conversation, another sample of the same answer) is refused with 400: one
episode is one sequence, and tokens that the policy did not see in this order cannot be trained on as one. A client's retry of its last
request (`x-stainless-retry-count`) gets the same answer.

Sampling is the rollout's: `temperature`, if given, must be rollout.temperature (evaluations may be greedy all the same), `top_p` 1, penalties 0,
`n` 1. `max_tokens`, `max_completion_tokens`, `stop` and `tools` work. Whatever else would change the answer is refused with 400, by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from areal_lite.data.tokenizer import Message
from areal_lite.rollout.episode import Episode
from areal_lite.rollout.transcript import Transcript
from areal_lite.rollout.workflows.tool_calls import parse_tool_calls, without_tool_calls
from areal_lite.trajectory import Trajectory

log = logging.getLogger(__name__)
MODEL = "policy"
_LARGEST_REQUEST = 64 << 20
_USED = {"messages", "max_tokens", "max_completion_tokens", "stop", "tools"}
_IGNORED = {
    "model",
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "service_tier",
}  # they change nothing in the answer
_ONLY = {
    "n": 1, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "stream": False, "logprobs": False,
    "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
}  # fmt: skip


class Refused(Exception):
    """A 400 with this message."""

    def __init__(self, message: str, code: str = "unsupported_value"):
        super().__init__(message)
        self.code = code


class Conversation:
    """One episode's calls. `truncated`: a request was refused because the token budget is used up."""

    def __init__(self, episode: Episode):
        self.episode = episode
        self.truncated = False
        self._transcript: Transcript | None = None
        self._messages: list[Message] = []  # so far, the policy's answers included
        self._tools: list[dict[str, Any]] = []
        self._answer: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        self._broken: str | None = None

    async def chat(self, body: dict[str, Any], is_retry: bool) -> dict[str, Any]:
        """The answer to one request. Raises Refused."""
        async with self._lock:
            messages = _messages(body.get("messages"))
            if is_retry and self._messages and _same(messages, self._messages[:-1]):
                return self._answer
            if self._broken:
                raise Refused(self._broken, "episode_failed")
            _check(body, self.episode.params.temperature)
            new = self._continuation(messages)
            tools = body.get("tools") or []
            if self._messages and tools != self._tools:
                raise Refused("tools must be the same in every request of an episode")
            stop, budget = (
                _stop(body.get("stop")),
                body.get("max_completion_tokens") or body.get("max_tokens"),
            )
            try:
                self._extend(new, tools)
                self._answer = await self._sample(budget, stop, bool(tools))
            except ValueError as error:  # of the chat template, or a server that refuses
                self._broken = f"the episode cannot go on: {error}"
                raise Refused(self._broken, "episode_failed") from error
            self._messages, self._tools = [*messages, self._answer["choices"][0]["message"]], tools
            return self._answer

    def trajectory(self, reward: float | None) -> Trajectory:
        if self._transcript is None:
            raise ValueError("the agent asked the policy nothing")
        if self.truncated:
            self._transcript.finish_reason = "length"
        return self._transcript.trajectory(reward)

    def _continuation(self, messages: list[Message]) -> list[Message]:
        """What is new. Raises Refused if that is not all that is different."""
        known = len(self._messages)
        for index, (given, recorded) in enumerate(zip(messages, self._messages)):
            if not _same([given], [recorded]):
                raise Refused(
                    f"messages[{index}] is not what this episode's conversation has there: an episode is one conversation",
                    "conversation_diverged",
                )
        if len(messages) <= known:
            raise Refused(
                f"the conversation has {known} messages already, and none of the {len(messages)} given is new",
                "conversation_diverged",
            )
        return messages[known:]

    def _extend(self, new: list[Message], tools: list[dict[str, Any]]) -> None:
        tokenizer = self.episode.tokenizer
        if self._transcript is None:
            self._transcript = Transcript(self.episode, tokenizer.chat(new, tools))
        elif not self._transcript.append(tokenizer.chat_after_answer(new)):
            self.truncated = True
            raise Refused(
                "the token budget of the episode (rollout.max_new_tokens) is used up",
                "context_length_exceeded",
            )

    async def _sample(self, budget: int | None, stop: list[str], has_tools: bool) -> dict[str, Any]:
        before = len(self._transcript.tokens)
        text = await self._transcript.complete(budget, stop)
        after = len(self._transcript.tokens)
        text = text[: min((i for i in map(text.find, stop) if i >= 0), default=len(text))]
        message: Message = {"role": "assistant", "content": text}
        finish = self._transcript.finish_reason
        if has_tools and (
            calls := [
                _tool_call(call) for call in parse_tool_calls(text) if not isinstance(call, str)
            ]
        ):
            message, finish = (
                {
                    "role": "assistant",
                    "content": without_tool_calls(text) or None,
                    "tool_calls": calls,
                },
                "tool_calls",
            )
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [
                {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
            ],
            "usage": {
                "prompt_tokens": before,
                "completion_tokens": after - before,
                "total_tokens": after,
            },
        }


class OpenAIEndpoint:
    """`await start()`, then `with conversation(episode) as (api_key, conversation)` for each episode; `await close()`."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self._host, self._port = host, port
        self._conversations: dict[str, Conversation] = {}
        app = web.Application(client_max_size=_LARGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self.base_url = ""

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        port = self._runner.addresses[0][1]
        self.base_url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    @contextlib.contextmanager
    def conversation(self, episode: Episode) -> Iterator[tuple[str, Conversation]]:
        key, conversation = secrets.token_urlsafe(24), Conversation(episode)
        self._conversations[key] = conversation
        try:
            yield key, conversation
        finally:
            del self._conversations[key]

    def _of(self, request: web.Request) -> Conversation | None:
        return self._conversations.get(
            request.headers.get("Authorization", "").removeprefix("Bearer ")
        )

    async def _models(self, request: web.Request) -> web.Response:
        if self._of(request) is None:
            return _error(401, "no episode has this API key", "invalid_api_key")
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "areal_lite"}],
            }
        )

    async def _chat(self, request: web.Request) -> web.Response:
        conversation = self._of(request)
        if conversation is None:
            return _error(401, "no episode has this API key (it may be over)", "invalid_api_key")
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise Refused("the request must be a JSON object", "invalid_json")
            return web.json_response(
                await conversation.chat(
                    body, request.headers.get("x-stainless-retry-count", "0") != "0"
                )
            )
        except json.JSONDecodeError as error:
            return _error(400, f"not JSON: {error}", "invalid_json")
        except Refused as refusal:
            return _error(400, str(refusal), refusal.code)


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response(
        {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": None,
                "code": code,
            }
        },
        status=status,
    )


def _check(body: dict[str, Any], temperature: float) -> None:
    """Raises Refused for what would change the distribution that is sampled from, or that we do not do. None stands for not given."""
    for key, value in body.items():
        if (
            value is None or key in _USED | _IGNORED or (key == "temperature" and temperature == 0)
        ):  # greedy, in an evaluation
            continue
        if key not in _ONLY and key != "temperature":
            raise Refused(f"{key} is not supported")
        only = temperature if key == "temperature" else _ONLY[key]
        if value != only:
            why = (
                ", rollout.temperature: log-probs must be of the distribution sampled from"
                if key == "temperature"
                else ""
            )
            raise Refused(f"{key}={value!r} must be {only!r}{why}")
    for key in ("max_tokens", "max_completion_tokens"):
        value = body.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise Refused(f"{key}={value!r} must be a positive integer", "invalid_value")


def _stop(given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise Refused(
            f"stop={given!r} must be a text or a list of texts, none of them empty", "invalid_value"
        )
    return texts


def _messages(given: Any) -> list[Message]:
    """Messages as the chat template takes them: content as one text, arguments of tool calls as objects. Raises Refused."""
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in given)
    ):
        raise Refused("messages must be a list, not empty, of objects with a role", "invalid_value")
    return [_message(message) for message in given]


def _message(given: Message) -> Message:
    content = given.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise Refused("content can only be text", "invalid_value")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(f"content {content!r:.100} is not a text", "invalid_value")
    message = {
        k: v for k, v in given.items() if k in ("role", "name", "tool_call_id") and v is not None
    } | {"content": content or ""}
    if calls := given.get("tool_calls"):
        try:
            message["tool_calls"] = [_for_template(call) for call in calls]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise Refused(
                f"tool_calls {calls!r:.100} cannot be understood: {error!r}", "invalid_value"
            ) from error
    return message


def _for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        **call,
        "function": {"name": function["name"], "arguments": json.loads(function["arguments"])},
    }


def _tool_call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def _same(some: list[Message], others: list[Message]) -> bool:
    def key(message: Message) -> tuple:
        return (
            message["role"],
            (message.get("content") or "").strip(),
            [call.get("id") for call in message.get("tool_calls") or ()],
        )

    return len(some) == len(others) and all(key(a) == key(b) for a, b in zip(some, others))
