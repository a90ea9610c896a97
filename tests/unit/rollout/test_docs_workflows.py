"""The examples of docs/workflows.md and of episode.py: commands compose, code does what it says."""

import asyncio
import importlib
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from areal_lite.config import RolloutConfig, TrainConfig
from areal_lite.config.command_line import compose_config
from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.worker import load_reward_function
from areal_lite.rollout import episode
from areal_lite.rollout.episode import Transcript, load_workflow, started
from areal_lite.workflows.endpoint.server import AgentEndpoint
from tests.unit.rollout.episodes import played, playing, save_chat_tokenizer

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
NAMES = re.findall(
    r"^\| `(areal_lite\.(?:rollout|rewards|workflows|environments)\.\S+)`", TEXT, re.MULTILINE
)
PROMPT = Prompt(prompt_id="p", tokens=[2], answer="4", text="2+2?")


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


def config_of(command: str) -> TrainConfig:
    arguments = [a for a in shlex.split(command.replace("\\\n", " ")) if a != "…"]
    assert arguments[:2] == ["areal-lite", "train"]
    return OmegaConf.to_object(
        compose_config("train", ["model=somewhere", "+task=addition", *arguments[2:]])
    )


def reward_and_text(tokenizer: Tokenizer, workflow, script: list[str]) -> tuple[float | None, str]:
    """Run a workflow on the prompt "Hi" with the answer "4"; the policy says `script`."""

    async def main():
        messages = [{"role": "user", "content": "Hi"}]
        prompt = Prompt(
            prompt_id="p",
            tokens=tokenizer.chat(messages),
            answer="4",
            text="Hi",
            messages=messages,
        )
        async with (
            started(workflow, None),
            playing(tokenizer, prompt, script, max_new_tokens=2000) as (episodes, _, _),
        ):
            ((trajectory,),) = await asyncio.gather(*played(workflow, episodes))
            return trajectory.reward, tokenizer.decode(trajectory.tokens)

    return asyncio.run(main())


def test_every_kind_has_its_code_and_its_command() -> None:
    agents = ["my_agent.py", "my_other_agent.py"]
    files = ["my_task.py", "my_tools.py", *agents, "my_workflow.py", "my_reward.py"]
    assert list(CODE) == files and len(COMMANDS) == 5


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose_and_load(command: str) -> None:
    config = config_of(command)
    load_workflow(config.rollout)
    load_reward_function(config.reward.function)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_the_tables_can_be_loaded(name: str) -> None:
    if name.startswith("areal_lite.rewards"):
        load_reward_function(name)
        return
    arguments = {
        "MultiTurn": {"feedback": "my_task:feedback"},
        "Agent": {"agent": "my_agent:agent"},
        "McpTools": {"servers": ["my_server"]},
    }.get(name.rpartition(":")[2], {})
    load_workflow(RolloutConfig(workflow=name, workflow_args=arguments))


@pytest.mark.parametrize(
    "path", re.findall(r"`((?:areal_lite|tests)/[\w/]+(?:\.py|/))`", TEXT) or ["none"]
)
def test_every_file_that_is_named_exists(path: str) -> None:
    assert (Path(__file__).parents[3] / path).exists()


def test_feedback(tokenizer) -> None:
    workflow = load_workflow(config_of(COMMANDS[0]).rollout)
    reward, text = reward_and_text(tokenizer, workflow, ["5", "4"])
    assert reward == 0.5 and "5 is wrong. Try again." in text


def test_tools(tokenizer) -> None:
    workflow = load_workflow(config_of(COMMANDS[1]).rollout)
    call = '<tool_call>{"name": "capital", "arguments": {"country": "Peru"}}</tool_call>'
    reward, text = reward_and_text(tokenizer, workflow, [call, "It is Lima."])
    assert reward is None and "<tool_response>Lima</tool_response>" in text


def test_a_workflow_of_ones_own(tokenizer) -> None:
    workflow = load_workflow(RolloutConfig(workflow="my_workflow:twice"))
    assert reward_and_text(tokenizer, workflow, ["long answer", "short"])[0] == 1.0
    assert reward_and_text(tokenizer, workflow, ["short", "long answer"])[0] == 0.0


def test_a_reward_of_ones_own() -> None:
    reward = load_reward_function(config_of(COMMANDS[4]).reward.function)
    assert [reward("It is 4.", "4"), reward("It is 5.", "4")] == [1.0, 0.0]


def test_the_example_that_explains_workflows(tokenizer) -> None:
    names = {**vars(episode), "Transcript": Transcript}
    example = re.search(r"(?:^    .*\n)+", episode.__doc__ or "", re.MULTILINE)
    assert example
    exec(textwrap.dedent(example[0]), names)
    assert reward_and_text(tokenizer, names["exact_match"], [" 4 "])[0] == 1.0
    assert reward_and_text(tokenizer, names["exact_match"], ["5"])[0] == 0.0


@pytest.mark.parametrize(
    "module, script, reward, text",
    [
        (
            "my_agent",
            ["5", "No: 4"],
            None,
            "user\n2+2?\nassistant\n5\nuser\nAre you sure?\nassistant\nNo: 4",
        ),
        ("my_other_agent", ["4"], 1.0, "user\n2+2?\nassistant\n4"),
    ],
)
def test_agents(tokenizer, module: str, script: list[str], reward: float | None, text: str) -> None:
    agent = importlib.import_module(module).agent

    async def main() -> None:
        endpoint = AgentEndpoint()
        await endpoint.listen()
        async with playing(tokenizer, PROMPT, script) as (episodes, _, _):
            with endpoint.conversations(episodes[0]) as (key, conversations):
                assert await agent(endpoint.base_url, key, PROMPT) == reward
            (trajectory,) = conversations.traces(None)
            assert tokenizer.decode(trajectory.tokens) == text
        await endpoint.close()

    asyncio.run(main())
