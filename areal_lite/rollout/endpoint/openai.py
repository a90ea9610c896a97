"""OpenAI's Chat Completions API, and what anthropic.py translates to it: requests and answers.

Source: its public reference, read in November 2026. The functions raise RequestRefused for what is
not supported or would change the distribution that the policy is sampled from.
"""

import json
import secrets
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_lite.config.sections import TRUNCATED_SAMPLING, WHOLE_VOCABULARY
from areal_lite.data.tokenizer import Message
from areal_lite.rollout.workflows.tools import ToolCall, parse_tool_calls, without_tool_calls

# The name of the policy as a model.
MODEL = "policy"

# As many as OpenAI takes, and more. Each of them is looked for in every answer.
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 1000


class RequestRefused(Exception):
    """A request that is answered with status 400, this message and `code`."""

    def __init__(self, message: str, code: str = "unsupported_value"):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for the next message of a conversation, as the chat template takes it.

    Without `max_tokens`, only the budget of the trace limits the answer.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    stop: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy's answer to a request.

    `message` has calls with arguments as JSON, `finish_reason` is one of OpenAI's, and `stop_text`
    is the text of `stop` that ended the answer, if one did.
    """

    id: str
    message: Message
    finish_reason: str
    stop_text: str | None
    prompt_tokens: int
    completion_tokens: int


def parse_body(raw: bytes) -> dict[str, Any]:
    """Decode a request. It is UTF-8, and no text in it has half a surrogate pair."""
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise RequestRefused("the request must be a JSON object", "invalid_json")
    return body


def check_settings(
    body: dict[str, Any], temperature: float, free: Set[str], only_value: Mapping[str, Any]
) -> None:
    """Refuse settings that would change the answer; null stands for a setting that is not given.

    `temperature` is the episode's. If it is 0 (a greedy evaluation), the request's own is ignored.
    Settings in `free` may have any value, those in `only_value` this one.
    """
    for key, value in body.items():
        if value is None or key in free:
            continue
        if key == "temperature":
            if temperature != 0 and not _is(value, temperature):
                raise RequestRefused(
                    f"temperature={value!r:.100} must be {temperature!r}, rollout.temperature:"
                    " log-probs must be of the distribution sampled from"
                )
        elif key not in only_value:
            raise RequestRefused(f"{key:.100} is not supported{_reason(key)}")
        elif not _is(value, only_value[key]):
            raise RequestRefused(f"{key}={value!r:.100} must be {only_value[key]!r}{_reason(key)}")


def _reason(key: str) -> str:
    return f": {WHOLE_VOCABULARY}" if key in TRUNCATED_SAMPLING else ""


def _is(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def parse_max_tokens(body: dict[str, Any], *keys: str) -> int | None:
    """Return the value of the first of `keys` that is given."""
    given = {key: body[key] for key in keys if body.get(key) is not None}
    for key, value in given.items():
        if type(value) is not int or value < 1:
            raise RequestRefused(
                f"{key}={value!r:.100} must be a positive integer", "invalid_value"
            )
    return next(iter(given.values()), None)


def parse_stop(body: dict[str, Any], key: str) -> list[str]:
    given = body.get(key)
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestRefused(
            f"{key}={given!r:.100} must be a text or a list of texts, none of them empty",
            "invalid_value",
        )
    if len(texts) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        raise RequestRefused(
            f"{key}: at most {_MAX_STOPS} texts of {_MAX_STOP_CHARACTERS} characters",
            "invalid_value",
        )
    return texts


def parse_tools(given: Any) -> list[dict[str, Any]]:
    tools = given or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestRefused(f"tools={given!r:.100} must be a list of objects", "invalid_value")
    return tools


def check_messages(given: Any) -> list[Message]:
    """Return `given` if it is a list of messages, whatever they say."""
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in given)
    ):
        raise RequestRefused(
            "messages must be a list, not empty, of objects with a role", "invalid_value"
        )
    return given


def parse_messages(given: Any) -> list[Message]:
    """Return OpenAI's messages with text as content and tool arguments as objects."""
    return [_parse_message(message) for message in check_messages(given)]


def _parse_message(given: Message) -> Message:
    message: Message = {}
    for key in ("role", "name", "tool_call_id"):
        if (value := given.get(key)) is not None:
            message[key] = _text(value, key)
    if message["role"] == "developer":  # the newer name; chat templates know the older one
        message["role"] = "system"
    message["content"] = _parse_content(given.get("content"))
    if calls := given.get("tool_calls"):
        try:
            message["tool_calls"] = [_parse_call(call) for call in calls]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise RequestRefused(
                f"tool_calls {calls!r:.100} cannot be understood: {error!r:.100}", "invalid_value"
            ) from error
    return message


def _parse_content(content: Any) -> str:
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise RequestRefused("content can only be text", "invalid_value")
        return "".join(_text(part.get("text"), "text of a content part") for part in content)
    return "" if content is None else _text(content, "content")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RequestRefused(f"{what} {value!r:.100} is no text: give a string", "invalid_value")
    return value


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    name = _text(function["name"], "name of a tool call")
    arguments = msgspec.json.decode(function["arguments"])
    return {**call, "function": {"name": name, "arguments": arguments}}


def same_messages(some: list[Message], others: list[Message]) -> bool:
    """Return whether two conversations are equal, apart from white space around their texts."""

    def key(message: Message) -> tuple:
        calls = [call.get("id") for call in message.get("tool_calls") or ()]
        return message["role"], (message.get("content") or "").strip(), calls

    return len(some) == len(others) and all(key(a) == key(b) for a, b in zip(some, others))


def answer_message(text: str, has_tools: bool) -> Message:
    """Return the policy's text as an assistant message, with its tool calls if there are tools."""
    calls = [c for c in parse_tool_calls(text) if isinstance(c, ToolCall)] if has_tools else []
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": without_tool_calls(text) or None,
        "tool_calls": [_call_message(call) for call in calls],
    }


def _call_message(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


_USED = {"messages", "max_tokens", "max_completion_tokens", "stop", "tools"}
# These keys change nothing in the answer.
_IGNORED = {"model", "user", "metadata", "store", "safety_identifier", "service_tier"}
_ONLY_VALUE = {
    "n": 1,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "stream": False,
    "logprobs": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}


def parse_request(body: dict[str, Any], temperature: float) -> ChatRequest:
    """Check a request. Raises RequestRefused."""
    check_settings(body, temperature, _USED | _IGNORED, _ONLY_VALUE)
    return ChatRequest(
        messages=parse_messages(body.get("messages")),
        tools=parse_tools(body.get("tools")),
        max_tokens=parse_max_tokens(body, "max_completion_tokens", "max_tokens"),
        stop=parse_stop(body, "stop"),
    )


def response(answer: Answer) -> dict[str, Any]:
    """Return a `chat.completion` object."""
    choice = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def error(status: int, message: str, code: str) -> dict[str, Any]:
    """Return the body of a refusal."""
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return {"error": fields}
