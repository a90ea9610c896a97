"""An agent of a framework, smolagents, on the endpoint: its tools run, and each step is a trace."""

import asyncio
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from smolagents import OpenAIModel, ToolCallingAgent, tool

from areal_lite.rollout.episode import sampled_turns
from areal_lite.workflows.endpoint.server import AgentEndpoint
from tests.unit.rollout.episodes import chat_prompt, playing, save_chat_tokenizer


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


# The beginning of a call of any tool, which the endpoint writes for the policy.
BEGUN = '<tool_call>{"name":"'


def tool_call(name: str, **arguments: object) -> str:
    called = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{called}</tool_call>"


def solve(base_url: str, api_key: str, settings: dict) -> object:
    model = OpenAIModel("policy", base_url, api_key=api_key, **settings)
    return ToolCallingAgent([add], model, verbosity_level=0).run("What is 17 + 25?")


@pytest.mark.parametrize(
    ("settings", "before", "begun"),
    [({"tool_choice": "auto"}, "I add. ", ""), ({}, "", BEGUN)],
)
def test_smolagents_calls_its_tools_and_answers(
    tmp_path: Path, settings: dict, before: str, begun: str
) -> None:
    """It tells the policy of earlier calls in words of its own, so every request is a trace.

    It requires calls unless it is told not to. These are begun for the policy.
    """
    tokenizer = save_chat_tokenizer(tmp_path)
    calls = [tool_call("add", a=17, b=25), tool_call("final_answer", answer="42")]
    said = [before + call.removeprefix(begun) for call in calls]

    async def main() -> None:
        endpoint = AgentEndpoint()
        await endpoint.listen()
        async with playing(tokenizer, chat_prompt(tokenizer), said) as (episodes, scripted, _):
            with endpoint.conversations(episodes[0]) as (key, conversations):
                assert await asyncio.to_thread(solve, endpoint.base_url, key, settings) == "42"
        await endpoint.close()
        traces = conversations.traces(1.0)
        requests = iter(scripted.seen)
        for trace, text in zip(traces, said, strict=True):
            (turn,) = sampled_turns(trace.check())
            tokens = trace.tokens.tolist()
            _, asked, answered = next(requests)
            while answered != tokens[turn]:  # a colon may complete a stop text: the answer goes on
                _, again, more = next(requests)
                assert again == asked + answered
                answered = answered + more
            assert tokens[: turn.start] == asked
            assert tokenizer.decode(tokens[turn]) == text
        assert next(requests, None) is None
        assert "Observation:\n42" in tokenizer.decode(traces[1].tokens.tolist())

    asyncio.run(main())


def test_the_example_runs_its_agent_and_gives_the_reward(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples/openai_agent/my_smolagent.py"
    agent = runpy.run_path(str(path))["agent"]
    tokenizer = save_chat_tokenizer(tmp_path)
    said = [tool_call("add", a=17, b=25), tool_call("final_answer", answer="42")]
    prompt = chat_prompt(tokenizer, "What is 17 + 25?")

    async def main() -> list[float]:
        endpoint, rewards = AgentEndpoint(), []
        await endpoint.listen()
        async with playing(tokenizer, prompt, said, list(said)) as (episodes, _, _):
            for episode, answer in zip(episodes, ("42", "43"), strict=True):
                with endpoint.conversations(episode) as (key, _):
                    asked = replace(prompt, answer=answer)
                    rewards.append(await agent(endpoint.base_url, key, asked))
        await endpoint.close()
        return rewards

    assert asyncio.run(main()) == [1.0, 0.0]
