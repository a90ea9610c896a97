"""Tool calls in the format of the Qwen chat templates: a JSON object in each `<tool_call>`.

<tool_call>
{"name": "calculator", "arguments": {"expression": "12 * 12"}}
</tool_call>
"""

import re
from typing import Any

import msgspec

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(msgspec.Struct):
    """A function's name and its keyword arguments."""

    name: str
    arguments: dict[str, Any] = {}


def parse_tool_calls(text: str) -> list[ToolCall | str]:
    """Return a text's calls; one that cannot be parsed becomes an error message."""
    return [_parse(body) for body in _CALL.findall(text)]


def _parse(body: str) -> ToolCall | str:
    try:
        return msgspec.json.decode(body, type=ToolCall)
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        return f"not a tool call: {error}"


def without_tool_calls(text: str) -> str:
    return _CALL.sub("", text).strip()
