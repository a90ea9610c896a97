"""Tool use: the policy calls functions (areal_lite/rollout/workflows/tool_calls.py says how) and reads what they return.

A call ends the policy's turn, as chat models are trained to do; the answer comes as a `tool` message of the chat template. A turn without a
call is the final answer. Whatever goes wrong with a call is told to the policy, as text: it may learn from it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import operator
import os
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.rewards.sandbox.run import Limits, SandboxError, run_python
from areal_lite.rollout.episode import Episode
from areal_lite.rollout.transcript import Transcript
from areal_lite.rollout.workflows.tool_calls import ToolCall, parse_tool_calls
from areal_lite.system.imports import load_object
from areal_lite.trajectory import Trajectory


class Tools:
    """`tools`: `calculator`, `python`, or any `module:function`, sync (and quick) or async, with type hints and a Google-style docstring, from
    which its JSON schema for the chat template is made. It ends after `max_turns` turns of the policy, or when the token budget is used up.
    Of a tool's answer at most `max_characters` are shown.
    """

    def __init__(
        self,
        tools: list[str] = ("calculator", "python"),
        max_turns: int = 8,
        max_characters: int = 2000,
    ):
        if not tools or max_turns < 1 or max_characters < 1:
            raise ValueError(
                "tools must not be empty; max_turns and max_characters must be at least 1"
            )
        own = {"calculator": calculator, "python": self.python}
        functions = [
            own.get(name) or load_object("rollout.workflow_args.tools", name) for name in tools
        ]
        self._functions = {function.__name__: function for function in functions}
        self._schemas: list[dict[str, Any]] = []
        self._max_turns, self._max_characters = max_turns, max_characters
        self._sandboxes = asyncio.Semaphore(os.cpu_count() or 1)

    async def start(self, config: TrainConfig) -> None:
        self._schemas = [_schema(function) for function in self._functions.values()]

    async def __call__(self, episode: Episode) -> Trajectory:
        prompt = episode.prompt
        transcript = Transcript(
            episode,
            episode.tokenizer.chat(prompt.messages, self._schemas) if prompt.messages else None,
        )
        for turn in range(self._max_turns):
            calls = parse_tool_calls(await transcript.complete())
            if not calls or turn == self._max_turns - 1:
                break
            answers = [(await self._answer(call))[: self._max_characters] for call in calls]
            if not transcript.reply([{"role": "tool", "content": answer} for answer in answers]):
                break
        return transcript.trajectory()

    async def _answer(self, call: ToolCall | str) -> str:
        if isinstance(call, str):
            return f"error: {call}"
        if call.name not in self._functions:
            return f"error: there is no tool {call.name!r}, only {', '.join(self._functions)}"
        try:
            answer = self._functions[call.name](**call.arguments)
            return str(await answer if inspect.isawaitable(answer) else answer)
        except SandboxError:
            raise
        except Exception as error:  # a tool may raise anything over what the policy asks of it
            return f"error: {type(error).__name__}: {error}"

    async def python(self, code: str) -> str:
        """
        Runs a Python program and returns what it prints. Nothing is kept from one run to the next. There is no network.

        Args:
            code: the program
        """
        async with self._sandboxes:
            outcome = await run_python(code, limits=Limits(output_bytes=1 << 16))
        if outcome.ended != "exit":
            return f"{outcome.stdout}\nerror: " + (
                "it ran for too long" if outcome.ended == "timeout" else "it printed too much"
            )
        return outcome.stdout + outcome.stderr


def _schema(function: Any) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import (
        get_json_schema,
    )  # seconds, and only this workflow needs it

    try:
        return get_json_schema(function)
    except Exception as error:
        raise ValueError(
            f"tool {function.__name__} needs type hints and a docstring that says what each argument is: {error}"
        ) from error


_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_MOST_BITS = 4096
_LONGEST = 1000


def calculator(expression: str) -> str:
    """
    Computes the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / // % **, and parentheses, such as (1 + 2) * 3
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"an expression of more than {_LONGEST} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(
        int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        else value
    )


def _value(node: ast.expr) -> int | float:
    """Bounded: no number grows beyond _MOST_BITS."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_value(node.operand))
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise OverflowError("the number is too large")
            return value
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base.bit_length() * abs(exponent) > _MOST_BITS
    ):
        raise OverflowError("the number is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the root of a negative number")
    return value
