"""Tool calls in the format of the Qwen chat templates: a JSON object in each `<tool_call>`.

<tool_call>
{"name": "calculator", "arguments": {"expression": "12 * 12"}}
</tool_call>
"""

from collections.abc import Iterator
from typing import Any

import msgspec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(msgspec.Struct):
    """A function's name and its keyword arguments."""

    name: str
    arguments: dict[str, Any] = {}


def parse_tool_calls(text: str) -> list[ToolCall | str]:
    """Return a text's calls; one that cannot be parsed becomes an error message."""
    return [_parse(body) for _, body in _split(text) if body is not None]


def without_tool_calls(text: str) -> str:
    return "".join(before for before, _ in _split(text)).strip()


def _split(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield (text before a call, body of the call), and at the end (rest of the text, None).

    The time is linear in the text, also for one that opens a thousand calls and closes none.
    """
    *closed, rest = text.split(_CLOSE)
    for part in closed:
        before, found, body = part.partition(_OPEN)
        yield (before, body) if found else (before + _CLOSE, None)
    yield rest, None


def _parse(body: str) -> ToolCall | str:
    try:
        return msgspec.json.decode(body, type=ToolCall)
    except (ValueError, RecursionError) as error:
        return f"not a tool call: {error}"
