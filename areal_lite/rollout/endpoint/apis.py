"""OpenAI's Chat Completions API and Anthropic's Messages API: requests and answers.

Source: their public references, read in November 2026. Anthropic's messages are translated to those
of OpenAI, which chat templates take: `system` becomes the first message, tool uses become calls,
and tool results become messages of their own. Both APIs may be used in one conversation.

The functions raise RequestRefused for what is not supported or would change the distribution that
the policy is sampled from.
"""

import itertools
import json
import secrets
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from areal_lite.config.sections import TRUNCATED_SAMPLING, WHOLE_VOCABULARY
from areal_lite.data.tokenizer import Message
from areal_lite.rollout.workflows.tools import ToolCall, parse_tool_calls, without_tool_calls

# The name of the policy as a model.
MODEL = "policy"

# More than OpenAI allows. Every answer is searched for each.
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 1000


class RequestRefused(Exception):
    """A request that is answered with status 400, this message and `code`."""

    def __init__(self, message: str, code: str = "unsupported_value"):
        super().__init__(message)
        self.code = code


def _invalid(message: str) -> RequestRefused:
    return RequestRefused(message, "invalid_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for the next message of a conversation, as the chat template takes it.

    Without `max_tokens`, only the budget of the trace limits the answer.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    stop: list[str]
    most_calls: int | None = None  # calls of an answer that the agent takes; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy's answer to a request."""

    id: str
    message: Message  # calls have their arguments as JSON
    finish_reason: str  # one of OpenAI's
    stop_text: str | None  # the text of `stop` that ended the answer, if one did
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
    body: dict[str, Any], temperature: float | None, free: Set[str], neutral: Mapping[str, tuple]
) -> None:
    """Refuse settings that would change the answer; null stands for a setting that is not given.

    `temperature` is the episode's. If it is None (an evaluation), the request's own is ignored.
    Settings in `free` may have any value, settings in `neutral` only values without effect.
    """
    for key, value in body.items():
        if value is None or key in free:
            continue
        if key == "temperature":
            if temperature is not None and not _is(value, temperature):
                raise RequestRefused(
                    f"temperature={value!r:.100} must be {temperature!r}, rollout.temperature:"
                    " log-probs must be of the distribution sampled from"
                )
        elif key not in neutral:
            raise RequestRefused(f"{key:.100} is not supported{_reason(key)}")
        elif not any(_is(value, allowed) for allowed in neutral[key]):
            allowed = " or ".join(map(repr, neutral[key]))
            raise RequestRefused(f"{key}={value!r:.100} must be {allowed}{_reason(key)}")


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
            raise _invalid(f"{key}={value!r:.100} must be a positive integer")
    return next(iter(given.values()), None)


def parse_stop(body: dict[str, Any], key: str) -> list[str]:
    given = body.get(key)
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _invalid(f"{key}={given!r:.100} must be a string or a list of strings, none empty")
    if len(texts) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        raise _invalid(f"{key}: at most {_MAX_STOPS} texts of {_MAX_STOP_CHARACTERS} characters")
    return texts


def parse_tools(given: Any) -> list[dict[str, Any]]:
    tools = given or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _invalid(f"tools={given!r:.100} must be a list of objects")
    return tools


def check_messages(given: Any) -> list[Message]:
    """Return `given` if it is a list of messages, whatever they say."""
    if (
        not isinstance(given, list)
        or not given
        or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in given)
    ):
        raise _invalid("messages must be a list, not empty, of objects with a role")
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
            raise _invalid(
                f"tool_calls {calls!r:.100} cannot be understood: {error!r:.100}"
            ) from error
    return message


def _parse_content(content: Any) -> str:
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise _invalid("content can only be text")
        return "".join(_text(part.get("text"), "text of a content part") for part in content)
    return "" if content is None else _text(content, "content")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _invalid(f"{what} {value!r:.100} must be a string")
    return value


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    name = _text(function["name"], "name of a tool call")
    arguments = msgspec.json.decode(function["arguments"] or "{}")
    return {**call, "function": {"name": name, "arguments": arguments}}


def same_messages(some: list[Message], others: list[Message]) -> bool:
    """Return whether two conversations are equal, apart from white space around their texts."""

    def key(message: Message) -> tuple:
        calls = [call.get("id") for call in message.get("tool_calls") or ()]
        return message["role"], (message.get("content") or "").strip(), calls

    return len(some) == len(others) and all(key(a) == key(b) for a, b in zip(some, others))


def answer_message(text: str, most_calls: int | None) -> Message:
    """Return the policy's text as an assistant message, with so many of its tool calls."""
    calls = [call for call in parse_tool_calls(text) if isinstance(call, ToolCall)][:most_calls]
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": without_tool_calls(text) or None,
        "tool_calls": [
            _call_message(f"call_{secrets.token_hex(8)}", call.name, call.arguments)
            for call in calls
        ],
    }


def _call_message(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


_OPENAI_USED = {"messages", "max_tokens", "max_completion_tokens", "stop", "tools"}
# These keys change nothing in the answer.
_OPENAI_IGNORED = {"model", "user", "metadata", "store", "safety_identifier", "service_tier"}
_OPENAI_NEUTRAL = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "stream": (False,),
    "logprobs": (False,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
}


def _openai_request(body: dict[str, Any], temperature: float | None) -> ChatRequest:
    check_settings(body, temperature, _OPENAI_USED | _OPENAI_IGNORED, _OPENAI_NEUTRAL)
    one = body.get("parallel_tool_calls") is False
    return ChatRequest(
        messages=parse_messages(body.get("messages")),
        tools=parse_tools(body.get("tools")),
        max_tokens=parse_max_tokens(body, "max_completion_tokens", "max_tokens"),
        stop=parse_stop(body, "stop"),
        most_calls=0 if body.get("tool_choice") == "none" else 1 if one else None,
    )


def _openai_response(answer: Answer) -> dict[str, Any]:
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


def _openai_error(status: int, message: str, code: str) -> dict[str, Any]:
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return {"error": fields}


_ANTHROPIC_USED = {"messages", "system", "max_tokens", "stop_sequences", "tools"}
# These keys change nothing in the answer.
_ANTHROPIC_IGNORED = {"model", "metadata", "service_tier", "cache_control"}
_ANTHROPIC_NEUTRAL = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "stream": (False,),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
}
_ROLES = ("user", "assistant", "system")
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}
_ERROR_TYPES = {401: "authentication_error", 408: "timeout_error", 413: "request_too_large"}


def _anthropic_request(body: dict[str, Any], temperature: float | None) -> ChatRequest:
    check_settings(body, temperature, _ANTHROPIC_USED | _ANTHROPIC_IGNORED, _ANTHROPIC_NEUTRAL)
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in check_messages(body.get("messages")):
        messages += _chat_messages(message)
    if messages and messages[-1]["role"] == "assistant":
        raise RequestRefused("the last message must be the user's: answers are not continued")
    return ChatRequest(
        messages=parse_messages(messages),
        tools=[_chat_tool(tool) for tool in parse_tools(body.get("tools"))],
        max_tokens=parse_max_tokens(body, "max_tokens"),
        stop=parse_stop(body, "stop_sequences"),
        most_calls=0 if body.get("tool_choice") == {"type": "none"} else None,
    )


def _chat_messages(message: Message) -> list[Message]:
    """Translate a message. Each tool result becomes a message, and so does the text beside it."""
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        raise _invalid(f"role {role!r:.100} must be one of {', '.join(_ROLES)}")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    if not all(isinstance(block, dict) for block in content):
        raise _invalid("content must be a string or a list of objects")
    if role == "assistant":
        uses = [block for block in content if block.get("type") == "tool_use"]
        texts = [block for block in content if block.get("type") != "tool_use"]
        calls = [_call_message(use.get("id"), use.get("name"), use.get("input")) for use in uses]
        return [{"role": role, "content": texts, "tool_calls": calls}]
    messages = []
    for is_result, blocks in itertools.groupby(content, lambda b: b.get("type") == "tool_result"):
        if is_result:
            messages += [
                {"role": "tool", "tool_call_id": b.get("tool_use_id"), "content": b.get("content")}
                for b in blocks
            ]
        else:
            messages.append({"role": role, "content": list(blocks)})
    return messages


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestRefused(
            f"tools: {tool['type']!r:.100} runs on Anthropic's servers, or is known to their models"
            " only; give a tool with an input_schema"
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {},
    }
    return {"type": "function", "function": function}


def _anthropic_response(answer: Answer) -> dict[str, Any]:
    """Return a `message` object. It has text, which may be empty, or calls, or both."""
    calls = answer.message.get("tool_calls", [])
    text = answer.message["content"] or ""
    content: list[dict[str, Any]] = [] if calls and not text else [{"type": "text", "text": text}]
    for call in calls:
        function = call["function"]
        content.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": json.loads(function["arguments"]),
            }
        )
    ended = "stop_sequence" if answer.stop_text else "end_turn"
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": _STOP_REASONS.get(answer.finish_reason, ended),
        "stop_sequence": answer.stop_text,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def _anthropic_error(status: int, message: str, code: str) -> dict[str, Any]:
    """Return the body of a refusal. Anthropic's own has no `code`."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


class Api(NamedTuple):
    """The translations of an API."""

    parse_request: Callable[[dict[str, Any], float | None], ChatRequest]  # (body, temperature)
    response: Callable[[Answer], dict[str, Any]]
    error: Callable[[int, str, str], dict[str, Any]]  # (status, message, code)


OPENAI = Api(_openai_request, _openai_response, _openai_error)
APIS = {
    "/v1/chat/completions": OPENAI,
    "/v1/messages": Api(_anthropic_request, _anthropic_response, _anthropic_error),
}  # by path
