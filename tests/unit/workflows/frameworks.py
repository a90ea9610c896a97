"""Agents of frameworks, written as their documentation says, and the requests that they send.

    python -m tests.unit.workflows.frameworks

records the requests of each framework that is installed in tests/data/frameworks, without keys or
anything of the machine. test_frameworks.py sends them again, also where no framework is installed.
"""

# The frameworks are not installed where the types are checked.
# pyright: reportMissingImports=false

import asyncio
import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from aiohttp import web

from areal_lite.trajectory import Trajectory
from areal_lite.workflows.endpoint import chat_request as chat
from areal_lite.workflows.endpoint import server
from areal_lite.workflows.endpoint.apis import Api
from areal_lite.workflows.endpoint.server import AgentEndpoint
from tests.unit.rollout.episodes import Scripted, chat_prompt, playing, save_chat_tokenizer

RECORDED = Path(__file__).parents[2] / "data" / "frameworks"
QUESTION = "What is 17 + 25?"
INSTRUCTIONS = "Use your tools."


# The beginning of a required call, which the endpoint writes for the policy.
BEGUN = '<tool_call>{"name":"'


def call(name: str, **arguments: object) -> str:
    """Write a call as the policy does."""
    called = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{called}</tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


ADDS = [f"I add. {call('add', a=17, b=25)}", call("add", a=42, b=0), "It is 42."]


async def openai_agents(base_url: str, api_key: str, model: str = "Responses") -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    asked = getattr(agents, f"OpenAI{model}Model")(model="policy", openai_client=client)
    agent = agents.Agent(
        name="adder", instructions=INSTRUCTIONS, tools=[agents.function_tool(add)], model=asked
    )
    return (await agents.Runner.run(agent, QUESTION)).final_output


async def openai_agents_chat(base_url: str, api_key: str) -> str:
    return await openai_agents(base_url, api_key, "ChatCompletions")


async def openai_agents_streamed(base_url: str, api_key: str) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
    agent = agents.Agent(
        name="adder", instructions=INSTRUCTIONS, tools=[agents.function_tool(add)], model=model
    )
    running = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in running.stream_events():
        pass
    return running.final_output


async def langgraph(base_url: str, api_key: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_retries=0)
    agent = create_agent(model, [add], system_prompt=INSTRUCTIONS)
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    return (await asyncio.to_thread(agent.invoke, asked))["messages"][-1].content


async def langgraph_streamed(base_url: str, api_key: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="policy", base_url=base_url, api_key=api_key, max_retries=0, streaming=True
    )
    agent = create_agent(model, [add], system_prompt=INSTRUCTIONS)
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    chunks = await asyncio.to_thread(list, agent.stream(asked, stream_mode="messages"))
    tools = max(i for i, (chunk, _) in enumerate(chunks) if chunk.type == "tool")
    return "".join(chunk.content for chunk, _ in chunks[tools + 1 :])


async def pydantic_ai(base_url: str, api_key: str, model: str = "OpenAIChatModel") -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    asked = getattr(openai, model)("policy", provider=provider)
    agent = Agent(asked, instructions=INSTRUCTIONS, tools=[add])
    return (await agent.run(QUESTION)).output


async def pydantic_ai_responses(base_url: str, api_key: str) -> str:
    return await pydantic_ai(base_url, api_key, "OpenAIResponsesModel")


async def pydantic_ai_typed(base_url: str, api_key: str) -> str:
    """Ask for an object, which the policy gives by a call that the agent requires."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Total(BaseModel):
        total: int

    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    model = OpenAIChatModel("policy", provider=provider)
    agent = Agent(model, instructions=INSTRUCTIONS, tools=[add], output_type=Total)
    return f"It is {(await agent.run(QUESTION)).output.total}."


async def smolagents(base_url: str, api_key: str) -> str:
    """Write programs. Their outputs are messages of the user."""
    from smolagents import CodeAgent, OpenAIModel

    model = OpenAIModel("policy", base_url, api_key=api_key)
    agent = CodeAgent([], model, verbosity_level=0)
    return f"It is {await asyncio.to_thread(agent.run, QUESTION)}."


async def mini_swe_agent(base_url: str, api_key: str) -> str:
    os.environ["MSWEA_SILENT_STARTUP"] = "True"
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks the network for prices
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": base_url, "api_key": api_key, "drop_params": True},
        cost_tracking="ignore_errors",
    )
    with tempfile.TemporaryDirectory() as folder:
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=folder),
            system_template=INSTRUCTIONS,
            instance_template="{{task}}",
        )
        result = await asyncio.to_thread(agent.run, QUESTION)
    return result["submission"].strip()


def bash(command: str) -> str:
    return f"I run it. {call('bash', command=command)}"


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 'It is 42.'"


@dataclass(frozen=True)
class Framework:
    """An agent, the package that it needs, and what the policy says to it."""

    agent: Callable[[str, str], Awaitable[str]]
    package: str
    says: list[str] = field(default_factory=lambda: list(ADDS))

    @property
    def name(self) -> str:
        return self.agent.__name__

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None


FRAMEWORKS = [
    Framework(openai_agents, "agents"),
    Framework(openai_agents_chat, "agents"),
    Framework(openai_agents_streamed, "agents"),
    Framework(langgraph, "langchain"),
    Framework(langgraph_streamed, "langchain"),
    Framework(pydantic_ai, "pydantic_ai"),
    Framework(pydantic_ai_responses, "pydantic_ai"),
    Framework(
        pydantic_ai_typed,
        "pydantic_ai",
        [
            said.removeprefix(BEGUN)
            for said in (call("add", a=17, b=25), call("final_result", total=42))
        ],
    ),
    Framework(
        smolagents,
        "smolagents",
        ["I add.\n<code>\nprint(17 + 25)\n</code>", "<code>\nfinal_answer(42)\n</code>"],
    ),
    Framework(
        mini_swe_agent, "minisweagent", [bash("echo $((17 + 25))"), bash("ls"), bash(SUBMIT)]
    ),
]


@contextlib.contextmanager
def counted_ids() -> Iterator[None]:
    """Number answers and calls, which are random otherwise: a recorded history names them."""
    numbers = count(1)

    def token_hex(size: int) -> str:
        return f"{next(numbers):0{2 * size}x}"

    counted = SimpleNamespace(token_hex=token_hex, token_urlsafe=secrets.token_urlsafe)
    with mock.patch.object(server, "secrets", counted), mock.patch.object(chat, "secrets", counted):
        yield


class Recorder(AgentEndpoint):
    """An endpoint that keeps requests, and the statuses of their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[dict[str, Any]] = []
        self.statuses: list[int] = []

    async def _ask(self, api: Api, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests.append({"path": request.path, "body": json.loads(body)})
        answer = await super()._ask(api, request)
        self.statuses.append(answer.status)
        return answer


@dataclass
class Episode:
    """The inputs of an agent and its result."""

    endpoint: Recorder
    api_key: str
    scripted: Scripted
    traces: list[Trajectory] = field(default_factory=list)


@contextlib.asynccontextmanager
async def serving(folder: Path, says: list[str]) -> AsyncIterator[Episode]:
    """Serve a policy that says each text of `says` in turn. The traces are there at the end."""
    tokenizer, endpoint = save_chat_tokenizer(folder), Recorder()
    await endpoint.listen()
    prompt = chat_prompt(tokenizer)
    async with playing(tokenizer, prompt, says, max_new_tokens=20_000) as (episodes, scripted, _):
        with counted_ids(), endpoint.conversations(episodes[0]) as (key, conversations):
            episode = Episode(endpoint, key, scripted)
            yield episode
            episode.traces = conversations.traces(0.5)
    await endpoint.close()


async def record(framework: Framework) -> None:
    """Run an agent, and write its requests."""
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), framework.says) as episode:
            said = await framework.agent(episode.endpoint.base_url, episode.api_key)
    print(framework.name, said, episode.endpoint.statuses, len(episode.traces))
    text = json.dumps(episode.endpoint.requests, indent=1, ensure_ascii=False)
    (RECORDED / f"{framework.name}.json").write_text(text + "\n")


def main() -> None:
    RECORDED.mkdir(parents=True, exist_ok=True)
    for framework in FRAMEWORKS:
        if framework.is_installed and framework.name in (sys.argv[1:] or [framework.name]):
            asyncio.run(record(framework))


if __name__ == "__main__":
    main()
