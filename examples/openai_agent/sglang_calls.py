"""Tool calls in the format of any model, by SGLang's parsers.

Their import takes seconds and half a gigabyte in each process of `rollout.workers`.
"""

import functools
import json
from types import SimpleNamespace

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.template_detection import detect_reasoning_pattern, detect_tool_call_parser

# One of SGLang's names, such as "llama3". None: SGLang chooses by the chat template.
PARSER = None


def parse(text, tools, tokenizer):
    """Return a text without its calls, and the name and the arguments of each call."""
    thought, mark, said = text.rpartition("</think>")
    if "<think>" in said:  # an unfinished thought calls nothing
        return text, []
    parser = FunctionCallParser([Tool(**tool) for tool in tools], PARSER or chosen(tokenizer))
    said, calls = parser.parse_non_stream(said)
    return thought + mark + said, [(call.name, json.loads(call.parameters)) for call in calls]


@functools.cache
def chosen(tokenizer):
    """Return the name of the parser for the chat template. Raises ValueError if there is none."""
    template = tokenizer.chat_template
    vocabulary = SimpleNamespace(get_vocab=lambda: tokenizer.ids)
    forced, reasoning = detect_reasoning_pattern(template)
    name = detect_tool_call_parser(template, vocabulary, reasoning, forced)
    if name is None:
        raise ValueError("SGLang knows no parser for this chat template: set PARSER")
    return name
