"""Tool calls in a text: one JSON object between `<tool_call>` and `</tool_call>` for each, the format of the Qwen chat templates.

<tool_call>
{"name": "calculator", "arguments": {"expression": "12 * 12"}}
</tool_call>
"""

from __future__ import annotations

import re

import msgspec

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(msgspec.Struct):
    name: str
    arguments: dict = {}


def parse_tool_calls(text: str) -> list[ToolCall | str]:
    """The calls in their order; for one that cannot be understood, what is wrong with it."""
    return [_parse(body) for body in _CALL.findall(text)]


def _parse(body: str) -> ToolCall | str:
    try:
        return msgspec.json.decode(body, type=ToolCall)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        return f"not a tool call: {error}"


def without_tool_calls(text: str) -> str:
    return _CALL.sub("", text).strip()
