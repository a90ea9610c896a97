"""Thoughts and calls of tools in what a model writes, by SGLang's parsers.

The package `sglang` imports torch and kernels for GPUs: ten seconds and half a gigabyte in each
process. The modules of its parsers need neither, and are imported without it, in a second.
"""

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from areal_lite.data.tokenizer import Tokenizer

# What parsers import and do not use to parse a text.
_UNUSED = (
    *("sglang.srt.entrypoints.openai.protocol", "sglang.srt.arg_groups.overrides"),
    "sglang.srt.arg_groups.muse_spark_hook",  # of 0.5.23
    *("transformers", "xgrammar", "xgrammar.structural_tag"),
)
# Formats that SGLang does not recognize, by what a chat template or a vocabulary has.
_MARKS = {"[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3", "<tool_call>": "hermes"}
# Parsers search for the end of each, so that their time is the square of this.
_MOST_CALLS = 256


class Parsed(NamedTuple):
    """The parts of an answer. `is_broken`: it means a call, and none can be understood."""

    thought: str
    thought_text: str  # with its marks
    said: str  # beside thought and calls
    calls: list[tuple[str, dict[str, Any]]]  # name and arguments
    is_broken: bool = False


class AnswerParser:
    """Finds thoughts and calls in the answers of the model with `tokenizer`.

    The names are of SGLang's parsers. `auto` chooses by chat template and vocabulary: a format that
    nothing gives away is `hermes`, without thoughts. Raises ValueError for a name that is none.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = "auto", thoughts: str = "auto"):
        check_parsers(tool_parser, thoughts)
        sglang, template, ids = _sglang(), tokenizer.chat_template, tokenizer.ids
        always, toggle = sglang.detect_reasoning_pattern(template)
        detected = template, SimpleNamespace(get_vocab=lambda: ids), toggle, always
        if tool_parser == "auto":
            marks = (mark for mark in _MARKS if mark in ids or mark in (template or ""))
            known = sglang.detect_tool_call_parser(*detected)
            tool_parser = known or _MARKS.get(next(marks, ""), "hermes")
        if thoughts == "auto":
            thoughts = sglang.detect_reasoning_parser(*detected) or ""
        self.tool_parser, self.thoughts = tool_parser, thoughts

    def parse(self, text: str, tools: Sequence[dict[str, Any]], before: str = "") -> Parsed:
        """Parse an answer, which has its special tokens, to a prompt that ends with `before`."""
        thought, said = self._thought(text, before)
        written = text.removesuffix(said) if thought else ""
        parser = self._parser(tools)
        beside, found, arguments = said, [], []
        try:
            if said.count(getattr(parser.detector, "bot_token", "") or said) <= _MOST_CALLS:
                beside, found = parser.parse_non_stream(said)
                # Strict JSON, as the agent has to send the call back: NaN is none.
                arguments = [msgspec.json.decode(call.parameters or "{}") for call in found]
        except Exception:  # a policy writes anything, and each parser was made for one model
            found = []
        if not found or not all(isinstance(one, dict) for one in arguments):
            return Parsed(thought, written, said, [], bool(tools) and parser.has_tool_call(said))
        calls = [(str(call.name), given) for call, given in zip(found, arguments)]
        return Parsed(thought, written, beside, calls)

    def begin_call(self, name: str | None = None) -> str | None:
        """Return the beginning of a call of the tool `name` or of any; None if it is unknown."""
        names = [name] if name else ["a", "b"]
        try:
            structure = self._parser([]).detector.structure_info()
        except NotImplementedError:
            return None
        formats = [structure(one) for one in names]
        whole = self.parse(f"{formats[0].begin}{{}}{formats[0].end}", [{"name": names[0]}])
        return os.path.commonprefix([f.begin for f in formats]) if whole.calls else None

    def _parser(self, tools: Sequence[dict[str, Any]]) -> Any:
        functions = [SimpleNamespace(type="function", function=_function(tool)) for tool in tools]
        return _sglang().FunctionCallParser(functions, self.tool_parser)

    def _thought(self, text: str, before: str) -> tuple[str, str]:
        """Split a text after its thought, which the prompt may have begun."""
        if not self.thoughts:
            return "", text
        parser = _sglang().ReasoningParser(
            self.thoughts, stream_reasoning=False, force_reasoning=True
        )
        begin, end = parser.detector.think_start_token, parser.detector.think_end_token
        if not before.rstrip().endswith(begin) and begin not in text and end not in text:
            return "", text
        thought, said = parser.parse_non_stream(text)
        return thought or "", said or ""


answer_parser = cache(AnswerParser)
"""Returns the parser for a model, which is made once."""


def check_parsers(tool_parser: str, thoughts: str) -> None:
    """Raise ValueError for a name that SGLang lacks, or if SGLang is not installed."""
    sglang = _sglang()
    for key, name, names in (
        ("tool_parser", tool_parser, ["auto", *sglang.FunctionCallParser.ToolCallParserEnum]),
        ("reasoning_parser", thoughts, ["", "auto", *sglang.ReasoningParser.DetectorMap]),
    ):
        if name not in names:
            raise ValueError(f"rollout.workflow_args.{key}={name}: SGLang knows {', '.join(names)}")


def _function(tool: dict[str, Any]) -> SimpleNamespace:
    given, keys = tool.get("function", tool), ("name", "description", "parameters", "strict")
    return SimpleNamespace(**{key: given.get(key) for key in keys})


@cache
def _sglang() -> SimpleNamespace:
    """Import SGLang's parsers. Raises ValueError where SGLang is not installed."""
    with _without_sglang():
        load = importlib.import_module
        calls = load("sglang.srt.function_call.function_call_parser")
        thoughts = load("sglang.srt.parser.reasoning_parser")
        detection = load("sglang.srt.parser.template_detection")
        settings = load("sglang.srt.environ")
    # A call of a tool that there is not is a call, too: the policy reads that it failed.
    settings.envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
    return SimpleNamespace(**vars(detection) | vars(calls) | vars(thoughts))


@contextmanager
def _without_sglang() -> Iterator[None]:
    """Have stand-ins for `sglang` and what its parsers do not use, until the block ends."""
    if (spec := importlib.util.find_spec("sglang")) is None:
        raise ValueError("sglang is not installed, whose parsers find calls: README.md, Start")
    package = ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations or ())
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if _is_replaced(name)}
    sys.modules.update({"sglang": package, **{name: _Unused(name) for name in _UNUSED}})
    try:
        yield
    finally:
        for name in filter(_is_replaced, [*sys.modules]):
            del sys.modules[name]
        sys.modules.update(before)


def _is_replaced(module: str) -> bool:
    return module.partition(".")[0] in ("sglang", "transformers", "xgrammar")


class _Unused(ModuleType):
    """A module that has a class of every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
