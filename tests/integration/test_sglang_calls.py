"""Calls in the formats of several models, by SGLang's parsers, as the example uses them."""

import asyncio
import json
import runpy
from pathlib import Path

import pytest

from areal_lite.cpu.sglang.stand_ins import install_stand_ins

install_stand_ins()

from openai import AsyncOpenAI  # noqa: E402

from areal_lite.rollout.endpoint.server import AgentEndpoint  # noqa: E402
from tests.unit.rollout.episodes import (  # noqa: E402
    CHAT_TEMPLATE,
    chat_prompt,
    playing,
    save_chat_tokenizer,
)

PROPERTIES = {"at": {"type": "string"}, "times": {"type": "integer"}}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": FUNCTION}]
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
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        f"<|tool_call_argument_begin|>{TEXT}<|tool_call_end|><|tool_calls_section_end|>"
    ),
}


@pytest.fixture
def example() -> dict:
    path = Path(__file__).parents[2] / "examples/openai_agent/sglang_calls.py"
    return runpy.run_path(str(path))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_the_format_of_a_model(example, name: str) -> None:
    parse = example["parse"]
    parse.__globals__["PARSER"] = name
    said, calls = parse(f"<think>so</think>{CALLS[name]}", TOOLS, None)
    assert said.strip() == "<think>so</think>" and calls == [("look", ARGUMENTS)]
    for thought in (f"<think>{CALLS[name]}</think>No.", f"<think>{CALLS[name]}"):
        assert parse(thought, TOOLS, None) == (thought, [])


def test_the_chat_template_chooses(example, tmp_path) -> None:
    tokenizer = save_chat_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="set PARSER"):
        example["parse"](XML, TOOLS, tokenizer)
    example["chosen"].cache_clear()
    tokenizer.chat_template = f"{{# {XML} #}}{CHAT_TEMPLATE}"

    async def main() -> None:
        endpoint = AgentEndpoint(parser=example["parse"])
        await endpoint.start()
        prompt = chat_prompt(tokenizer)
        async with playing(tokenizer, prompt, [f"I look.\n{XML}", "Red."]) as (episodes, *_):
            with endpoint.conversations(episodes[0]) as (key, conversations):
                async with AsyncOpenAI(base_url=endpoint.base_url, api_key=key) as client:
                    settings = {"model": "policy", "tools": TOOLS}
                    messages: list = [{"role": "user", "content": "a?"}]
                    answer = await client.chat.completions.create(messages=messages, **settings)
                    message = answer.choices[0].message
                    (call,) = message.tool_calls
                    assert message.content.strip() == "I look."
                    assert json.loads(call.function.arguments) == ARGUMENTS
                    messages.append(message.model_dump(exclude_none=True))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "red"})
                    answer = await client.chat.completions.create(messages=messages, **settings)
                    assert answer.choices[0].message.content == "Red."
        await endpoint.close()
        (trace,) = conversations.traces(1.0)
        assert XML in tokenizer.decode(trace.check().tokens)

    asyncio.run(main())
