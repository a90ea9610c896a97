"""Tool use: the policy calls functions and reads their results.

Calls have the format of the Qwen chat templates, a JSON object with `name` and `arguments` in each
`<tool_call>`. A call ends the policy's turn, as chat models are trained to do, and the result
follows as a `tool` message. A turn without a call is the final answer. An error in a call is
returned as text: the policy may learn from it.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from areal_lite.config import TrainConfig
from areal_lite.extensions import load_object
from areal_lite.rewards.sandbox.run import Limits, SandboxError, run_python
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory
from areal_lite.workers.marks import called

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(msgspec.Struct):
    """A function's name and its keyword arguments."""

    name: str
    arguments: dict[str, Any] = {}
    parameters: dict[str, Any] = {}  # what some models call them


def parse_tool_calls(text: str) -> list[ToolCall | str]:
    """Return the calls after a text's thoughts; a malformed call becomes an error message."""
    return [_parse(body) for _, body in _split(_thought(text)[1]) if body is not None]


def split_tool_calls(text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return what a text says beside its calls, and the name and the arguments of each call."""
    calls = (call for call in parse_tool_calls(text) if isinstance(call, ToolCall))
    return without_tool_calls(text), [(call.name, call.arguments) for call in calls]


def begin_tool_call(name: str | None = None) -> str:
    """Return the beginning of a call, of the function `name` or of any."""
    return f'{_OPEN}\n{{"name":' + (f' {json.dumps(name)}, "arguments":' if name else "")


def without_tool_calls(text: str) -> str:
    thought, said = _thought(text)
    return (thought + "".join(before for before, _ in _split(said))).strip()


def _thought(text: str) -> tuple[str, str]:
    """Split a text after `</think>`; an unfinished thought is followed by nothing."""
    thought, mark, said = text.rpartition("</think>")
    return (text, "") if not mark and "<think>" in text else (thought + mark, said)


def _split(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield (text before a call, body of the call), and at the end (rest of the text, None).

    The time is linear in the text, even if it opens a thousand calls and closes none.
    """
    *closed, rest = text.split(_CLOSE)
    for part in closed:
        before, found, body = part.partition(_OPEN)
        yield (before, body) if found else (before + _CLOSE, None)
    yield rest, None


def _parse(body: str) -> ToolCall | str:
    try:
        call = msgspec.json.decode(body, type=ToolCall)
        call.arguments, call.parameters = call.arguments or call.parameters, {}
        return call
    except (ValueError, RecursionError) as error:
        return f"not a tool call: {error}"


class Tools:
    """A conversation between the policy and its tools.

    Args:
        tools: `python`, or `module:function` of your own, which runs in a thread unless it is
            async. It needs type hints and a Google-style docstring, from which its JSON schema for
            the chat template is made.
        max_turns: answers of the policy after which the episode ends.
        max_characters: a tool's result is cut to this length.
    """

    def __init__(
        self,
        tools: Sequence[str] = ("python",),
        max_turns: int = 8,
        max_characters: int = 2000,
    ):
        if not tools or max_turns < 1 or max_characters < 1:
            raise ValueError(
                "tools must not be empty; max_turns and max_characters must be at least 1"
            )
        functions = [
            self.python if name == "python" else load_object("rollout.workflow_args.tools", name)
            for name in tools
        ]
        self._functions = {function.__name__: function for function in functions}
        self._schemas: list[dict[str, Any]] = []
        self._max_turns = max_turns
        self._max_characters = max_characters
        self._sandboxes = asyncio.Semaphore(os.cpu_count() or 1)

    async def start(self, config: TrainConfig) -> None:
        """Make the tools' schemas. Raises ValueError for a tool without hints or docstring."""
        self._schemas = [_schema(function) for function in self._functions.values()]

    async def __call__(self, episode: Episode) -> Trajectory:
        messages = episode.prompt.messages
        tokens = episode.tokenizer.chat(messages, self._schemas) if messages else None
        transcript = Transcript(episode, tokens)
        for turn in range(self._max_turns):
            calls = parse_tool_calls(await transcript.sample_text())
            if not calls or turn == self._max_turns - 1:
                break
            results = [(await self._result(call))[: self._max_characters] for call in calls]
            if not transcript.add_messages([{"role": "tool", "content": r} for r in results]):
                break
        return transcript.trajectory()

    async def _result(self, call: ToolCall | str) -> str:
        if isinstance(call, str):
            return f"error: {call}"
        if call.name not in self._functions:
            return f"error: there is no tool {call.name!r}, only {', '.join(self._functions)}"
        try:
            return str(await called(self._functions[call.name], **call.arguments))
        except SandboxError:
            raise
        except Exception as error:  # a tool may raise anything over arguments that a policy wrote
            return f"error: {type(error).__name__}: {error}"

    async def python(self, code: str) -> str:
        """
        Runs a Python program and returns its output. Each run starts afresh.
        There is no network.

        Args:
            code: the program
        """
        async with self._sandboxes:
            outcome = await run_python(code, limits=Limits(output_bytes=1 << 16))
        if outcome.ended == "timeout":
            return f"{outcome.stdout}\nerror: it ran for too long"
        if outcome.ended == "output":
            return f"{outcome.stdout}\nerror: it printed too much"
        return outcome.stdout + outcome.stderr


def _schema(function: Any) -> dict[str, Any]:
    # This import takes seconds, and only this workflow needs it.
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        raise ValueError(
            f"tool {function.__name__} needs type hints and a docstring"
            f" that says what each argument is: {error}"
        ) from error
