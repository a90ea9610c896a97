"""Chat completion requests: their settings, and their messages as the chat template takes them.

The functions raise RequestRefused for what is not supported or would change the distribution that
the policy is sampled from.
"""

import json
import secrets
from typing import Any

import msgspec

from areal_lite.config.rollout import TRUNCATED_SAMPLING, WHOLE_VOCABULARY
from areal_lite.data.tokenizer import Message
from areal_lite.rollout.workflows.tool_calls import ToolCall, parse_tool_calls, without_tool_calls

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


# As many as OpenAI takes, and more. Each of them is looked for in every answer.
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 1000


class RequestRefused(Exception):
    """A request that is answered with status 400, this message and `code`."""

    def __init__(self, message: str, code: str = "unsupported_value"):
        super().__init__(message)
        self.code = code


def parse_body(raw: bytes) -> dict[str, Any]:
    """Decode a request. It is UTF-8, and no text in it has half a surrogate pair."""
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise RequestRefused("the request must be a JSON object", "invalid_json")
    return body


def check_settings(body: dict[str, Any], temperature: float) -> None:
    """Refuse settings that would change the answer; null stands for a setting that is not given.

    If `temperature`, the episode's, is 0 (a greedy evaluation), the request's own is ignored.
    """
    for key, value in body.items():
        if value is None or key in _USED | _IGNORED:
            continue
        if key == "temperature":
            if temperature != 0 and not _is(value, temperature):
                raise RequestRefused(
                    f"temperature={value!r:.100} must be {temperature!r}, rollout.temperature:"
                    " log-probs must be of the distribution sampled from"
                )
        elif key not in _ONLY_VALUE:
            raise RequestRefused(f"{key:.100} is not supported{_reason(key)}")
        elif not _is(value, _ONLY_VALUE[key]):
            raise RequestRefused(f"{key}={value!r:.100} must be {_ONLY_VALUE[key]!r}{_reason(key)}")
    for key in ("max_tokens", "max_completion_tokens"):
        value = body.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise RequestRefused(
                f"{key}={value!r:.100} must be a positive integer", "invalid_value"
            )


def _reason(key: str) -> str:
    return f": {WHOLE_VOCABULARY}" if key in TRUNCATED_SAMPLING else ""


def _is(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def parse_stop(given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestRefused(
            f"stop={given!r:.100} must be a text or a list of texts, none of them empty",
            "invalid_value",
        )
    if len(texts) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        raise RequestRefused(
            f"stop: at most {_MAX_STOPS} texts of {_MAX_STOP_CHARACTERS} characters",
            "invalid_value",
        )
    return texts


def parse_tools(given: Any) -> list[dict[str, Any]]:
    tools = given or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestRefused(f"tools={given!r:.100} must be a list of objects", "invalid_value")
    return tools


def parse_messages(given: Any) -> list[Message]:
    """Return messages with text as content and tool arguments as objects."""
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in given)
    ):
        raise RequestRefused(
            "messages must be a list, not empty, of objects with a role", "invalid_value"
        )
    return [_parse_message(message) for message in given]


def _parse_message(given: Message) -> Message:
    message: Message = {}
    for key in ("role", "name", "tool_call_id"):
        if (value := given.get(key)) is not None:
            message[key] = _text(value, key)
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
