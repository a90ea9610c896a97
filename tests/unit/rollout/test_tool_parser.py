"""Tool calls in the format of a model, by a parser of the user's own."""

import asyncio
import contextlib
import re

import openai
import pytest
from openai import AsyncOpenAI

from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rollout.endpoint.server import AgentEndpoint
from areal_lite.rollout.workflows.agent import Agent
from tests.unit.rollout.episodes import chat_prompt, playing, save_chat_tokenizer
from tests.unit.rollout.test_conversations import Asker, assert_recorded, text_of, user

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


def marked_calls(text: str, tools: list, tokenizer: Tokenizer) -> tuple[str, list]:
    """Find calls such as `<|im_start|>look(it)`, which a special token begins."""
    if "stumble" in text:
        raise KeyError("stumble")
    assert tools == TOOLS and "<|im_end|>" not in text and tokenizer.chat_template
    calls = re.findall(r"<\|im_start\|>(\w+)\((\w+)\)", text)
    return text.partition("<|im_start|>")[0], [(name, {"at": at}) for name, at in calls]


async def marked_calls_later(text: str, tools: list, tokenizer: Tokenizer) -> tuple[str, list]:
    return marked_calls(text, tools, tokenizer)


def play(tokenizer: Tokenizer, parser, script: list[str], agent) -> list[str]:
    """Play an agent; return the texts of its traces."""

    @contextlib.asynccontextmanager
    async def asking():
        endpoint = AgentEndpoint(parser=parser)
        await endpoint.start()
        prompt = chat_prompt(tokenizer)
        async with playing(tokenizer, prompt, script) as (episodes, scripted, _):
            with endpoint.conversations(episodes[0]) as (key, conversations):
                async with AsyncOpenAI(
                    base_url=endpoint.base_url, api_key=key, max_retries=0
                ) as client:
                    yield Asker(client, scripted, conversations)
        await endpoint.close()

    async def main() -> list[str]:
        async with asking() as asker:
            await agent(asker)
            traces = asker.conversations.traces(0.5)
        assert_recorded(traces, asker.scripted)
        return [text_of(tokenizer, trace) for trace in traces]

    return asyncio.run(main())


@pytest.mark.parametrize("parser", [marked_calls, marked_calls_later])
def test_the_parser_finds_calls_by_special_tokens(tokenizer, parser) -> None:
    said = "I look. <|im_start|>look(it)<|im_start|>look(that)"

    async def agent(asker: Asker) -> None:
        *_, message = history = await asker.ask([user("a?")], tools=TOOLS)
        calls = message["tool_calls"]
        assert message["content"].strip() == "I look."
        assert [call["function"]["arguments"] for call in calls] == [
            '{"at": "it"}',
            '{"at": "that"}',
        ]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "red"} for c in calls]
        *_, message = history = await asker.ask([*history, *results], tools=TOOLS)
        assert message["content"] == "Red." and "tool_calls" not in message
        *_, message = await asker.ask([*history, user("b?")], tools=TOOLS, tool_choice="none")
        assert "tool_calls" not in message and message["content"] == "look(it)"

    red = "<tool_response>red</tool_response>"
    (text,) = play(tokenizer, parser, [said, "Red.", "<|im_start|>look(it)"], agent)
    begin = "<|im_start|>system Tools: look a? "
    assert text == f"{begin}<{said}> {red} {red} <Red.> b? <<|im_start|>look(it)>"


def test_a_stop_text_ends_what_is_parsed(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        *_, message = await asker.ask([user("a?")], tools=TOOLS, stop=")")
        assert "tool_calls" not in message and message["content"] == "look(it"

    play(tokenizer, marked_calls, ["<|im_start|>look(it)"], agent)


def test_a_parser_that_raises_ends_the_episode(tokenizer) -> None:
    """Nothing is asked again: the answer is in a trace, but the agent has not seen it."""

    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")], tools=TOOLS)
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=r"tool_parser: KeyError\('stumble'\)"):
                await asker.ask([*first, user("b?")], tools=TOOLS)

    begin = "<|im_start|>system Tools: look a? "
    assert play(tokenizer, marked_calls, ["Hm.", "stumble"], agent) == [
        f"{begin}<Hm.> b? <stumble>"
    ]


def test_no_call_can_be_required_of_a_format_without_a_beginning(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        with pytest.raises(openai.BadRequestError, match="must be auto or none with a tool_parser"):
            await asker.ask([user("a?")], tools=TOOLS, tool_choice="required")
        await asker.ask([user("a?")])

    assert play(tokenizer, marked_calls, ["a"], agent) == ["a? <a>"]


def test_the_workflow_loads_it() -> None:
    agent = "tests.integration.toy_agent:three_turns"
    Agent(agent, tool_parser=f"{__name__}:marked_calls")
    with pytest.raises(ValueError, match="rollout.workflow_args.tool_parser"):
        Agent(agent, tool_parser=f"{__name__}:nothing")
