"""A request for the next message of a conversation, whichever API it was written for.

The functions raise RequestRefused for what cannot be understood, and for settings that would change
the distribution that the policy is sampled from.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_lite.config.sections import WHOLE_VOCABULARY
from areal_lite.data.tokenizer import Message

# More than OpenAI allows. Every answer is searched for each.
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 1000


class RequestRefused(Exception):
    """A request that is answered with status 400, this message and `code`."""

    def __init__(self, message: str, code: str = "unsupported_value"):
        super().__init__(message)
        self.code = code


def invalid(message: str) -> RequestRefused:
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
    requires: str | None = None  # the tool that the answer must call; empty: any
    begins: str = ""  # the text that begins the answer; the policy does not sample it
    samples: int = 1  # answers
    wants_logprobs: bool = False
    # The messages that a later request may refer to by the answer's id; None: it may not.
    history: list[Message] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy's answer to a request."""

    id: str
    message: Message  # calls have their arguments as JSON
    finish_reason: str  # one of OpenAI's
    stop_text: str | None  # the text of `stop` that ended the answer, if one did
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[tuple[str, float]] | None  # of each sampled token, next to its text


def parse_body(raw: bytes) -> dict[str, Any]:
    """Decode a request. It is UTF-8, and no text in it has half a surrogate pair."""
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise RequestRefused("the request must be a JSON object", "invalid_json")
    return body


_TEXT_ONLY = "the policy reads and writes text only"
_MASKS = (
    *("json_schema", "regex", "ebnf", "structural_tag", "structured_outputs", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids", "bad_words"),
    *("min_tokens", "ignore_eos", "typical_p", "custom_logit_processor"),
)
_FLAGS = ("stream", "store", "logprobs", "parallel_tool_calls")
# The values that a setting may have, and why it may have no other. Settings that are not listed
# change nothing here.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(_MASKS, ((), WHOLE_VOCABULARY)),
    **dict.fromkeys(("top_p", "repetition_penalty"), ((1,), WHOLE_VOCABULARY)),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty"), ((0,), WHOLE_VOCABULARY)),
    "top_k": ((-1, 0), WHOLE_VOCABULARY),
    "logit_bias": (({},), WHOLE_VOCABULARY),
    "response_format": (({"type": "text"},), f"{WHOLE_VOCABULARY}; ask for JSON in a message"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "functions": ((), "give tools"),
    "web_search_options": ((), "give a function as a tool"),
    "conversation": ((), "give previous_response_id, or all items"),
    "prompt": ((), "no prompts are stored: give instructions and input"),
    "background": ((False,), "an answer comes at once"),
    **dict.fromkeys(_FLAGS, ((True, False), "it is a flag")),
}


def check_settings(body: dict[str, Any], temperature: float | None) -> None:
    """Refuse settings that would change the answer; null stands for a setting that is not given.

    `temperature` is the episode's. If it is None (an evaluation), the request's own is ignored.
    """
    given = body.get("temperature")
    if given is not None and temperature is not None and not _is(given, temperature):
        raise RequestRefused(
            f"temperature={given!r:.100} must be {temperature!r}, rollout.temperature:"
            " log-probs must be of the distribution sampled from"
        )
    for key in filter(_ALLOWED.__contains__, body):
        value, (allowed, reason) = body[key], _ALLOWED[key]
        if value is None or any(_is(value, other) for other in allowed):
            continue
        if not allowed:
            raise RequestRefused(f"{key} is not supported: {reason}")
        values = " or ".join(map(repr, allowed))
        raise RequestRefused(f"{key}={value!r:.100} must be {values}: {reason}")


def _is(value: Any, expected: Any) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def parse_object(body: dict[str, Any], key: str) -> dict[str, Any]:
    given = body.get(key) or {}
    if not isinstance(given, dict):
        raise invalid(f"{key}={given!r:.100} must be an object")
    return given


def parse_count(body: dict[str, Any], *keys: str, least: int = 1) -> int | None:
    """Return the value of the first of `keys` that is given."""
    given = {key: body[key] for key in keys if body.get(key) is not None}
    for key, value in given.items():
        if type(value) is not int or value < least:
            raise invalid(f"{key}={value!r:.100} must be an integer of at least {least}")
    return next(iter(given.values()), None)


def parse_stop(body: dict[str, Any], key: str) -> list[str]:
    given = body.get(key)
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise invalid(f"{key}={given!r:.100} must be a string or a list of strings, none empty")
    if len(texts) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        raise invalid(f"{key}: at most {_MAX_STOPS} texts of {_MAX_STOP_CHARACTERS} characters")
    return texts


def parse_tools(given: Any, known: Sequence[str | None] | None) -> list[dict[str, Any]]:
    """Return tools, each of a type that is `known`, or of any type if it is None."""
    tools = given or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid(f"tools={given!r:.100} must be a list of objects")
    for tool in tools:
        if known is not None and tool.get("type") not in known:
            raise RequestRefused(
                f"tools: {tool.get('type')!r:.100} runs on the API's own servers, or only their"
                " models know it; give a function with a JSON schema of its arguments"
            )
    return tools


def function_tool(tool: dict[str, Any], schema: str) -> dict[str, Any]:
    """Return a tool as Chat Completions has it; `schema` is the key of its JSON schema."""
    about = {"name": tool.get("name"), "description": tool.get("description") or ""}
    return {"type": "function", "function": {**about, "parameters": tool.get(schema) or {}}}


def choose_tools(choice: Any, tools: list[dict[str, Any]], parallel: Any) -> dict[str, Any]:
    """Return `most_calls` and `requires` of a ChatRequest by its `tool_choice`, in any API's words.

    If `parallel` is false, the agent takes one call.
    """
    chosen = choice if isinstance(choice, dict) else {"type": choice}
    kind = chosen.get("type")
    names = [function.get("name") for t in tools if isinstance(function := t.get("function"), dict)]
    named = (parse_object(chosen, "function") or chosen).get("name")
    fields: dict[str, Any] = {"most_calls": 1 if parallel is False else None}
    if kind == "none":
        return {"most_calls": 0}
    if kind in ("function", "tool") and isinstance(named, str) and named in names:
        return fields | {"requires": named}
    if kind in ("required", "any") and names:
        return fields | {"requires": ""}
    if kind in (None, "auto"):
        return fields
    raise invalid(
        f"tool_choice={choice!r:.100} must be none, auto, required or the name of a tool; the tools"
        f" are: {', '.join(map(str, names)) or 'none'}"
    )


def check_messages(given: Any) -> list[Message]:
    """Return `given` if it is a list of messages, whatever they say."""
    messages = given if isinstance(given, list) else []
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if not roles or not all(isinstance(role, str) for role in roles):
        raise invalid("messages must be a list, not empty, of objects with a role")
    return given


def parse_messages(given: Any) -> list[Message]:
    """Return OpenAI's messages with text as content and tool arguments as objects.

    System messages at the beginning become one: many chat templates take no second.
    """
    messages = [_parse_message(message) for message in check_messages(given)]
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if first < 2:
        return messages
    content = "\n\n".join(message["content"] for message in messages[:first])
    return [{"role": "system", "content": content}, *messages[first:]]


def _parse_message(given: Message) -> Message:
    message: Message = {}
    for key in ("role", "name", "tool_call_id"):
        if (value := given.get(key)) is not None:
            message[key] = parse_text(value, key)
    if message["role"] == "developer":  # the newer name; chat templates know the older one
        message["role"] = "system"
    message["content"] = _parse_content(given.get("content"))
    if calls := given.get("tool_calls"):
        try:
            message["tool_calls"] = [_parse_call(call) for call in calls]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise invalid(
                f"tool_calls {calls!r:.100} cannot be understood: {error!r:.100}"
            ) from error
    return message


_TEXT_PARTS = ("text", "input_text", "output_text")


def _parse_content(content: Any) -> str:
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
                raise invalid(f"content has {part!r:.100}, which is no text: {_TEXT_ONLY}")
        return "".join(parse_text(part.get("text"), "text of a content part") for part in content)
    return "" if content is None else parse_text(content, "content")


def parse_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"{what} {value!r:.100} must be a string")
    return value


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    name = parse_text(function["name"], "name of a tool call")
    arguments = msgspec.json.decode(function["arguments"] or "{}")
    return {**call, "function": {"name": name, "arguments": arguments}}


def same_messages(some: list[Message], others: list[Message]) -> bool:
    """Return whether two conversations are equal, apart from white space around their texts."""

    def key(message: Message) -> tuple:
        calls = [call.get("id") for call in message.get("tool_calls") or ()]
        return message["role"], (message.get("content") or "").strip(), calls

    return len(some) == len(others) and all(key(a) == key(b) for a, b in zip(some, others))


def answer_message(said: str, calls: Sequence[tuple[str, Any]], thought: str) -> Message:
    """Return what the policy said and called as an assistant message."""
    message: Message = {"role": "assistant", "content": said}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["content"] = said.strip() or None
        made = [call_message(f"call_{secrets.token_hex(8)}", *call) for call in calls]
        message["tool_calls"] = made
    return message


def call_message(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}
