"""Anthropic's Messages API. Source: its public reference, read in November 2026.

Its messages are translated to those of OpenAI, which chat templates take: `system` becomes the
first message, tool uses become calls, and tool results become messages of their own. Both APIs may
be used in one conversation.
"""

import itertools
import json
from typing import Any

from areal_lite.data.tokenizer import Message
from areal_lite.rollout.endpoint import openai
from areal_lite.rollout.endpoint.openai import Answer, ChatRequest, RequestRefused

_USED = {"messages", "system", "max_tokens", "stop_sequences", "tools"}
# These keys change nothing in the answer.
_IGNORED = {"model", "metadata", "service_tier", "cache_control"}
_ONLY_VALUE = {
    "top_p": 1,
    "stream": False,
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"},
}
_ROLES = ("user", "assistant", "system")
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}
_ERROR_TYPES = {401: "authentication_error", 408: "timeout_error", 413: "request_too_large"}


def parse_request(body: dict[str, Any], temperature: float) -> ChatRequest:
    """Check a request. Raises RequestRefused."""
    openai.check_settings(body, temperature, _USED | _IGNORED, _ONLY_VALUE)
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in openai.check_messages(body.get("messages")):
        messages += _chat_messages(message)
    if messages and messages[-1]["role"] == "assistant":
        raise RequestRefused("the last message must be the user's: answers are not continued")
    return ChatRequest(
        messages=openai.parse_messages(messages),
        tools=[_chat_tool(tool) for tool in openai.parse_tools(body.get("tools"))],
        max_tokens=openai.parse_max_tokens(body, "max_tokens"),
        stop=openai.parse_stop(body, "stop_sequences"),
    )


def _chat_messages(message: Message) -> list[Message]:
    """Translate a message. Each tool result becomes a message, and so does the text beside it."""
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        raise RequestRefused(f"role {role!r:.100} is none of {', '.join(_ROLES)}", "invalid_value")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    if not all(isinstance(block, dict) for block in content):
        raise RequestRefused("content must be a text or a list of objects", "invalid_value")
    if role == "assistant":
        calls = [_call(block) for block in content if block.get("type") == "tool_use"]
        texts = [block for block in content if block.get("type") != "tool_use"]
        return [{"role": role, "content": texts, "tool_calls": calls}]
    messages = []
    for is_result, blocks in itertools.groupby(content, lambda b: b.get("type") == "tool_result"):
        if is_result:
            messages += [_tool_message(block) for block in blocks]
        else:
            messages.append({"role": role, "content": list(blocks)})
    return messages


def _call(block: dict[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool_message(block: dict[str, Any]) -> Message:
    return {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id"),
        "content": block.get("content"),
    }


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


def response(answer: Answer) -> dict[str, Any]:
    """Return a `message` object. It has a text, perhaps an empty one, or calls, or both."""
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
        "model": openai.MODEL,
        "content": content,
        "stop_reason": _STOP_REASONS.get(answer.finish_reason, ended),
        "stop_sequence": answer.stop_text,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.completion_tokens,
        },
    }


def error(status: int, message: str, code: str) -> dict[str, Any]:
    """Return the body of a refusal. Anthropic's own has no `code`."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}
