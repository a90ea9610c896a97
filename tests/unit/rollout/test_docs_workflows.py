"""docs/workflows.md: its commands compose, and the code in it does what it says."""

import asyncio
import re
import shlex
import sys
from pathlib import Path

import pytest

from areal_lite.config import RolloutConfig, to_dataclass
from areal_lite.config.compose import compose_config
from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.function import load_reward_function
from areal_lite.rollout.openai_endpoint import OpenAIEndpoint
from areal_lite.rollout.runner import load_workflow, run_workflow
from tests.unit.rollout.episodes import playing, save_chat_tokenizer

TEXT = (Path(__file__).parents[3] / "docs" / "workflows.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
CODE = {
    body.splitlines()[0].removeprefix("# "): body
    for language, body in BLOCKS
    if language == "python"
}
COMMANDS = [
    body
    for language, body in BLOCKS
    if body.startswith("areal-lite ") and "module:name" not in body
]


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """The document's modules, ready to be imported."""
    for name, body in CODE.items():
        (tmp_path / name).write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in CODE:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


def rollout(command: str) -> RolloutConfig:
    arguments = [a for a in shlex.split(command.replace("\\\n", " ")) if a != "…"]
    assert arguments[:2] == ["areal-lite", "train"]
    return to_dataclass(compose_config("train", ["model=somewhere", *arguments[2:]])).rollout


def rewards_and_texts(
    tokenizer: Tokenizer, config: RolloutConfig, script: list[str]
) -> tuple[float | None, str]:
    async def main():
        messages = [{"role": "user", "content": "Hi"}]
        prompt = Prompt(
            prompt_id="p",
            tokens=tokenizer.chat(messages),
            answer="4",
            text="Hi",
            messages=messages,
        )
        workflow = load_workflow(config)
        async with playing(tokenizer, prompt, script, max_new_tokens=2000) as (episodes, _, _):
            if hasattr(workflow, "_schemas"):
                await workflow.start(None)
            (trajectory,) = await asyncio.gather(*run_workflow(workflow, episodes))
            return trajectory.reward, tokenizer.decode(trajectory.tokens)

    return asyncio.run(main())


def test_there_is_a_command_for_each_kind() -> None:
    assert len(COMMANDS) == 3 and list(CODE) == [
        "my_task.py",
        "my_tools.py",
        "my_agent.py",
        "my_workflow.py",
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose_and_load(command: str) -> None:
    load_workflow(rollout(command))


@pytest.mark.parametrize(
    "name",
    [
        *re.findall(r"^\| `(areal_lite\.rollout\.\S+)`", TEXT, re.MULTILINE),
        *re.findall(r"^\| `(areal_lite\.rewards\.\S+)`", TEXT, re.MULTILINE),
    ],
)
def test_every_name_in_the_tables_is_there(name: str) -> None:
    if name.startswith("areal_lite.rewards"):
        load_reward_function(name)
        return
    arguments = {
        "MultiTurn": {"feedback": "my_task:feedback"},
        "Agent": {"agent": "my_agent:agent"},
    }.get(name.rpartition(":")[2], {})
    load_workflow(RolloutConfig(workflow=name, workflow_args=arguments))


def test_feedback(tokenizer) -> None:
    reward, text = rewards_and_texts(tokenizer, rollout(COMMANDS[0]), ["5", "4"])
    assert reward == 0.5 and "5 is wrong. Try again." in text


def test_tools(tokenizer) -> None:
    call = '<tool_call>{"name": "capital", "arguments": {"country": "Peru"}}</tool_call>'
    reward, text = rewards_and_texts(tokenizer, rollout(COMMANDS[1]), [call, "It is Lima."])
    assert reward is None and "<tool_response>Lima</tool_response>" in text


def test_a_workflow_of_ones_own(tokenizer) -> None:
    config = RolloutConfig(workflow="my_workflow:twice")
    assert rewards_and_texts(tokenizer, config, ["long answer", "short"])[0] == 1.0
    assert rewards_and_texts(tokenizer, config, ["short", "long answer"])[0] == 0.0


def test_an_agent(tokenizer) -> None:
    async def main() -> None:
        from my_agent import agent

        endpoint = OpenAIEndpoint()
        await endpoint.start()
        prompt = Prompt(prompt_id="p", tokens=[2], answer="4", text="2+2?")
        async with playing(tokenizer, prompt, ["5", "No: 4"]) as (episodes, _, _):
            with endpoint.conversation(episodes[0]) as (key, conversation):
                assert await agent(endpoint.base_url, key, prompt) is None
            text = tokenizer.decode(conversation.trajectory(None).tokens)
            assert text == "user\n2+2?\nassistant\n5\nuser\nAre you sure?\nassistant\nNo: 4"
        await endpoint.close()

    asyncio.run(main())
