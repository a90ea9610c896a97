"""Calls in the formats of models: the core's parsers find what SGLang's own server finds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lite.workflows.tool_calls import AnswerParser
from tests.unit.rollout.episodes import save_chat_tokenizer

PROPERTIES = {"at": {"type": "string"}, "times": {"type": "integer"}}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {**FUNCTION, "name": "listen", "strict": True}},
]
ARGUMENTS = {"at": "it", "times": 2}
TEXT = json.dumps(ARGUMENTS)
XML = """<tool_call>
<function=look>
<parameter=at>
it
</parameter>
<parameter=times>
2
</parameter>
</function>
</tool_call>"""
# A call as each model's chat template shows it to the model.
CALLS = {
    "hermes": f'<tool_call>{{"name": "look", "arguments": {TEXT}}}</tool_call>',
    "qwen": f'<tool_call>\n{{"name": "look", "arguments": {TEXT}}}\n</tool_call>',
    "qwen3_coder": XML,
    "llama3": f'<|python_tag|>{{"name": "look", "parameters": {TEXT}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "look", "arguments": {TEXT}}}]',
    "pythonic": '[look(at="it", times=2)]',
    "glm45": (
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>it</arg_value>\n"
        "<arg_key>times</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
        f"```json\n{TEXT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
        f"{TEXT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        f"<|tool_call_argument_begin|>{TEXT}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.look <|constrain|>json<|message|>{TEXT}<|call|>"
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">it</parameter>\n'
        '<parameter name="times">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
}


def texts(call: str) -> list[str]:
    """Return what a model may write in place of one call."""
    return [
        *(call, f"I look.\n{call}", f"{call}\n{call}", call.replace("look", "listen")),
        *(call.replace("look", "smell"), call[: len(call) * 2 // 3], call[:-1]),
        *(call.replace("it", 'i"t\\'), call.replace("2", "two"), call.replace("at", "of")),
        *("I look no more.", "", call[1:], call * 3, f"{call} Done."),
    ]


REFERENCE = """
import json, sys
from areal_lite.cpu.sglang.stand_ins import install_stand_ins
install_stand_ins()
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
asked = json.load(sys.stdin)
tools = [Tool(**tool) for tool in asked["tools"]]
found = {}
for name, texts in asked["texts"].items():
    found[name] = []
    for text in texts:
        try:
            said, calls = FunctionCallParser(tools, name).parse_non_stream(text)
            calls = [[call.name, json.loads(call.parameters)] for call in calls]
        except Exception:
            said, calls = text, []
        found[name].append([said, calls] if calls else [text, []])
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def reference() -> dict[str, list]:
    """Return what SGLang's own classes find, in a process that imports all of SGLang."""
    asked = {"tools": TOOLS, "texts": {name: texts(call) for name, call in CALLS.items()}}
    process = subprocess.run(
        [sys.executable, "-c", REFERENCE],
        input=json.dumps(asked),
        env={**os.environ, "SGLANG_FORWARD_UNKNOWN_TOOLS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(process.stdout)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_calls_as_sglang(reference: dict[str, list], name: str, tmp_path) -> None:
    parser = AnswerParser(save_chat_tokenizer(tmp_path), name, "")
    written = texts(CALLS[name])
    for text, (said, calls) in zip(written, reference[name], strict=True):
        parsed = parser.parse(text, TOOLS)
        assert (parsed.said, [[*call] for call in parsed.calls]) == (said, calls), text
    counts = [len(calls) for _, calls in reference[name]]
    assert counts[:2] == [1, 1] and counts[10:12] == [0, 0]
    assert reference[name][0][1] == [["look", ARGUMENTS]]
