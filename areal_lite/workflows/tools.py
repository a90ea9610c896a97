"""Tool use: the policy calls functions and reads their results.

Calls have the format of the model (tool_calls.py). They end the policy's turn, as chat models are
trained to do, and their results follow as `tool` messages. A turn without a call is the final
answer. An error in a call is returned as text: the policy may learn from it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.extensions import load_object
from areal_lite.rewards.sandbox.run import Limits, SandboxError, run_python
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.system.processes import usable_cores
from areal_lite.trajectory import Trajectory
from areal_lite.workers.marks import called
from areal_lite.workflows.tool_calls import answer_parser, check_parsers

Function = Callable[..., Any]


class ToolsLost(RuntimeError):
    """Tools do not answer any more, which is not the policy's doing: the episode fails."""


class Tools:
    """A conversation between the policy and its tools.

    Args:
        tools: `python`, or `module:function` of your own, which runs in a thread unless it is
            async. It needs type hints and a Google-style docstring, from which its JSON schema for
            the chat template is made.
        max_turns: answers of the policy after which the episode ends.
        max_characters: a tool's result is cut to this length.
        tool_parser: what finds the calls: a parser of SGLang by name, or `auto`.
    """

    def __init__(
        self,
        tools: Sequence[str] = ("python",),
        max_turns: int = 8,
        max_characters: int = 2000,
        tool_parser: str = "auto",
    ):
        check_parsers(tool_parser, "auto")
        if max_turns < 1 or max_characters < 1:
            raise ValueError("max_turns and max_characters must be at least 1")
        self._functions: dict[str, Any] = {}
        for name in tools:
            own = name == "python"
            tool: Any = self.python if own else load_object("rollout.workflow_args.tools", name)
            if tool.__name__ in self._functions:
                raise ValueError(f"{name}: there is another tool {tool.__name__}; rename one")
            self._functions[tool.__name__] = tool
        self._schemas: list[dict[str, Any]] = []
        self._max_turns = max_turns
        self._max_characters = max_characters
        self._tool_parser = tool_parser
        self._sandboxes = asyncio.Semaphore(usable_cores())

    async def start(self, config: TrainConfig) -> None:
        """Make the tools' schemas. Raises ValueError for a tool without hints or docstring."""
        if not self._functions:
            raise ValueError("rollout.workflow_args.tools is empty: name a tool")
        self._schemas = [_schema(function) for function in self._functions.values()]

    async def __call__(self, episode: Episode) -> Trajectory:
        return await self.play(episode, self._functions)

    async def play(self, episode: Episode, functions: Mapping[str, Function]) -> Trajectory:
        """Play an episode with these functions, by the names in the schemas of `start`."""
        transcript = self.transcript(episode)
        await self.converse(transcript, functions)
        return transcript.trajectory()

    def transcript(self, episode: Episode) -> Transcript:
        """Begin a conversation whose prompt has the tools' schemas."""
        messages = episode.prompt.messages
        tokens = episode.tokenizer.chat(messages, self._schemas) if messages else None
        return Transcript(episode, tokens)

    async def converse(self, transcript: Transcript, functions: Mapping[str, Function]) -> None:
        """Let the policy answer and call functions until an answer has no call, or no turn is left.

        The finish reason of `transcript` is `length` if it has no tokens left.
        """
        parser = answer_parser(transcript.episode.tokenizer, self._tool_parser, "auto")
        for turn in range(self._max_turns):
            before = transcript.end_text()
            text = transcript.text(await transcript.sample())
            parsed = parser.parse(text, self._schemas, before)
            if not (parsed.calls or parsed.is_broken) or turn == self._max_turns - 1:
                return
            most = self._max_characters
            results = [(await _result(functions, *call))[:most] for call in parsed.calls]
            results = results or [f"error: not a tool call: {parsed.said[:most]}"]
            if not transcript.add_messages([{"role": "tool", "content": r} for r in results]):
                return

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


async def _result(functions: Mapping[str, Function], name: str, arguments: dict[str, Any]) -> str:
    if name not in functions:
        return f"error: there is no tool {name!r}, only {', '.join(functions)}"
    try:
        return str(await called(partial(functions[name], **arguments)))
    except (SandboxError, ToolsLost):
        raise
    except Exception as error:  # a tool may raise anything over arguments that a policy wrote
        return f"error: {type(error).__name__}: {error}"


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
