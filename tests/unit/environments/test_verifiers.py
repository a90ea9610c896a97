"""Environments of the package verifiers: the rewards of its own rollouts, and exact traces."""

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from openai import AsyncOpenAI

from areal_lite.config import DataConfig
from areal_lite.config.command_line import compose_config
from areal_lite.data.prompts import Prompt, PromptSet, load_prompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.environments import no_reward
from areal_lite.environments import verifiers as adapter
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.endpoint.server import AgentEndpoint
from tests.unit.rollout.episodes import playing, save_chat_tokenizer
from tests.unit.workflows.test_conversations import text_of

ROWS = "[{'question': f'{i}+{i}?', 'answer': str(2 * i), 'info': {'i': i}} for i in range(4)]"
MODULES = {
    # One answer, scored by two functions of different weights, one of which is async.
    "single": f"""
async def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def short(completion, info):
    return 1 / len(completion[-1]["content"]) + info["i"]

def load_environment(weight=0.5):
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, weight])
    return vf.SingleTurnEnv(dataset=Dataset.from_list({ROWS}), rubric=rubric)
""",
    # A system prompt, an example, and a parser of tags.
    "tags": f"""
def load_environment():
    parser = vf.XMLParser(["think", "answer"], answer_field="answer")
    def right(completion, answer):
        return float(parser.parse_answer(completion) == answer)
    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.2])
    example = [{{"role": "user", "content": "0+0?"}}]
    example.append({{"role": "assistant", "content": "<answer>0</answer>"}})
    data = Dataset.from_list({ROWS})
    return vf.SingleTurnEnv(
        dataset=data, rubric=rubric, parser=parser, system_prompt="Use tags.", few_shot=example)
""",
    # A game of several turns, whose state the rubric reads.
    "guessing": f"""
class Guessing(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        said = messages[-1]["content"]
        if said == state["answer"]:
            state["final_env_response"] = [{{"role": "user", "content": "Yes."}}]
        return [{{"role": "user", "content": f"Not {{said}}."}}]

def load_environment():
    def few(state):
        return 1 / state["tries"] if state["final_env_response"] else -0.5
    return Guessing(max_turns=3, dataset=Dataset.from_list({ROWS}), rubric=vf.Rubric(funcs=[few]))
""",
    # Tools, one of which fails.
    "tools": f"""
def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.\"\"\"
    return a + b

def fail() -> str:
    \"\"\"Fail.\"\"\"
    raise KeyError("no")

def load_environment():
    def right(completion, answer):
        return float(completion[-1]["content"] == answer)
    def calls(completion):
        return float(sum(message["role"] == "tool" for message in completion))
    rubric = vf.Rubric(funcs=[right, calls], weights=[1.0, 0.1])
    data = Dataset.from_list({ROWS})
    return vf.ToolEnv(tools=[add, fail], max_turns=4, dataset=data, rubric=rubric)
""",
    # A tool that reads the state of its episode.
    "notes": f"""
class Notes(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(tools=[], max_turns=4, **kwargs)
        self.add_tool(self.note, args_to_skip=["state"])

    async def setup_state(self, state):
        state["notes"] = []
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {{**tool_args, "state": state}}

    def note(self, text: str, state: dict) -> str:
        \"\"\"Keep a text.\"\"\"
        state["notes"].append(text)
        return f"kept {{len(state['notes'])}}"

def load_environment():
    def kept(state):
        return len(state["notes"])
    return Notes(dataset=Dataset.from_list({ROWS}), rubric=vf.Rubric(funcs=[kept]))
""",
}


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# What a policy says, by environment and number of the row.
SAID = {
    "single": {0: ["0"], 1: ["two"], 2: [""], 3: ["6"]},
    "tags": {0: ["<think>a</think><answer>0</answer>"], 1: ["<answer>2</answer>"], 2: ["4"]},
    "guessing": {0: ["0"], 1: ["1", "2"], 2: ["1", "2", "3"]},
    "tools": {
        0: ["0"],
        1: [f"I add. {call('add', a=1, b=1)}", "2"],
        2: [call("fail"), call("add", a=2), call("add", a=2, b=2), "4"],
        3: [call("subtract", a=9, b=3), "6"],
    },
    "notes": {0: [call("note", text="a"), call("note", text="b"), "Done."], 1: ["Done."]},
}


@pytest.fixture(autouse=True)
def environments(tmp_path: Path, monkeypatch):
    """Modules with environments, ready to be imported."""
    for name, code in MODULES.items():
        header = "import verifiers as vf\nfrom datasets import Dataset\n"
        (tmp_path / f"env_{name}.py").write_text(header + code)
    monkeypatch.syspath_prepend(tmp_path)
    adapter._environment.cache_clear()
    yield
    for name in MODULES:
        sys.modules.pop(f"env_{name}", None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


def problems(tokenizer: Tokenizer, split: str = "train", **args) -> PromptSet:
    composed = compose_config("train", ["model=m", "+task=verifiers"]).data
    config = DataConfig(source=composed.source, args=args)
    return load_prompts(config, tokenizer.path, split)


def test_a_missing_package_is_named_with_its_remedy(tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ValueError, match="verifiers is not installed: pip install 'verifiers<0.3'"):
        problems(tokenizer, environment="env_single")


def test_a_release_without_such_environments_is_named(tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(__version__="0.4.0"))
    with pytest.raises(ValueError, match="verifiers 0.4.0 has no .*: pip install 'verifiers<0.3'"):
        problems(tokenizer, environment="env_single")


def test_an_episode_without_a_reward_is_not_scored() -> None:
    with pytest.raises(ValueError, match="has given no reward"):
        no_reward("", "")


try:
    import verifiers
    from verifiers.clients import OpenAIChatCompletionsClient
except ImportError:
    verifiers = None
needs_package = pytest.mark.skipif(
    not hasattr(verifiers, "load_environment"), reason="pip install 'verifiers<0.3'"
)


def scripted_client(said: list[str]) -> AsyncOpenAI:
    """Return a client of OpenAI whose server says the texts in turn."""
    left = list(said)

    def answer(request: httpx.Request) -> httpx.Response:
        text, mark, body = left.pop(0).partition("<tool_call>")
        calls = None
        if mark:
            made = json.loads(body.removesuffix("</tool_call>"))
            function = {"name": made["name"], "arguments": json.dumps(made["arguments"])}
            calls = [{"id": f"c{len(left)}", "type": "function", "function": function}]
        message = {"role": "assistant", "content": text.strip(), "tool_calls": calls}
        reason = "tool_calls" if calls else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        known = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy"}
        return httpx.Response(200, json={**known, "choices": [choice]})

    transport = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return AsyncOpenAI(base_url="http://x/v1", api_key="x", http_client=transport)


def own_rollout(name: str, number: int, said: list[str]) -> float:
    """Return the reward of the package's own rollout."""
    environment = verifiers.load_environment(f"env_{name}")
    row = environment.get_dataset()[number]
    client = OpenAIChatCompletionsClient(scripted_client(said))
    output = asyncio.run(environment.run_rollout(row, client, "policy", {}))
    assert not output.get("error") or "" in said
    return output["reward"]


def played(
    tokenizer: Tokenizer, prompt: Prompt, said: list[str], budget: int = 2000
) -> tuple[float, list[Trajectory]]:
    """Return the reward and the traces of an episode at the endpoint."""

    async def main() -> tuple[float, list[Trajectory]]:
        endpoint = AgentEndpoint()
        await endpoint.listen()
        async with playing(tokenizer, prompt, said, max_new_tokens=budget) as (episodes, *_):
            with endpoint.conversations(episodes[0]) as (key, conversations):
                reward = await adapter.play(endpoint.base_url, key, prompt)
        await endpoint.close()
        adapter._client.cache_clear()
        return reward, conversations.traces(reward)

    return asyncio.run(main())


@needs_package
@pytest.mark.parametrize("name", MODULES)
def test_rewards_are_those_of_its_own_rollouts(tokenizer, name: str) -> None:
    prompts = problems(tokenizer, environment=f"env_{name}")
    assert prompts.num_prompts == 4
    rewards = {}
    for number, said in SAID[name].items():
        reward, traces = played(tokenizer, prompts[number], said)
        rewards[number] = reward
        assert reward == own_rollout(name, number, said)
        (trace,) = traces
        text = text_of(tokenizer, trace.check())
        assert all(f"<{answer}>" in text for answer in said if answer), text
    assert len(set(rewards.values())) > 1, rewards


@needs_package
def test_a_prompt_has_the_messages_and_the_row_of_the_environment(tokenizer) -> None:
    prompt = problems(tokenizer, environment="env_tags")[3]
    roles = [message["role"] for message in prompt.messages]
    assert roles == ["system", "user", "assistant", "user"]
    assert prompt.messages[-1]["content"] == "3+3?"
    assert (prompt.prompt_id, prompt.answer) == ("env_tags/train:4", "6")
    assert prompt.info["info"] == {"i": 3}
    held_out = problems(tokenizer, "eval", environment="env_tags")
    assert held_out[0].prompt_id == "env_tags/eval:1"


@needs_package
def test_arguments_reach_the_environment(tokenizer) -> None:
    own = problems(tokenizer, environment="env_single", arguments={"weight": 2.0})[1]
    assert played(tokenizer, own, ["2"])[0] == 1.0 + 2 * (1 + 1)
    assert played(tokenizer, problems(tokenizer, environment="env_single")[1], ["2"])[0] == 2.0


@needs_package
def test_the_signals_of_the_process_stay_its_own(tokenizer) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    problems(tokenizer, environment="env_single")
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@needs_package
def test_a_used_up_budget_ends_the_episode_and_the_rubric_scores_it(tokenizer) -> None:
    prompt = problems(tokenizer, environment="env_guessing")[1]
    reward, (trace,) = played(tokenizer, prompt, ["7", "8"], budget=20)
    assert reward == -0.5 and "<7>" in text_of(tokenizer, trace)


@needs_package
def test_what_cannot_be_used_is_named(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "env_group.py").write_text(
        "import verifiers as vf\n"
        "from datasets import Dataset\n"
        "def f(completions):\n"
        "    return [0.0 for _ in completions]\n"
        "def load_environment():\n"
        "    data = Dataset.from_list([{'question': '1', 'answer': '1'}])\n"
        "    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[f]))\n"
    )
    cases = {
        "env_nothing": "data.args.environment=env_nothing: Could not import",
        "env_group": "env_group: its rubric compares the answers of a group",
    }
    for name, complaint in cases.items():
        with pytest.raises(ValueError, match=complaint):
            problems(tokenizer, environment=name)
    with pytest.raises(ValueError, match="env_single: .*unexpected keyword argument 'size'"):
        problems(tokenizer, environment="env_single", arguments={"size": 1})


@needs_package
def test_an_error_of_the_environment_fails_the_episode(tokenizer) -> None:
    prompt = problems(tokenizer, environment="env_single")[0]
    broken = replace(prompt, info={**prompt.info, "verifiers": {**prompt.info["verifiers"]}})
    with pytest.raises(RuntimeError, match="verifiers: "):
        asyncio.run(adapter.play("http://127.0.0.1:9/v1", "key", broken))
