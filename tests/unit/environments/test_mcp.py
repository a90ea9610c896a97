"""Tools of MCP servers, real ones: what each episode sees, errors, and processes that end."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from areal_lite.config import TrainConfig
from areal_lite.environments.mcp import McpTools
from areal_lite.system.network import free_port
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.tools import ToolsLost
from tests.unit.rollout.episodes import chat_prompt, playing, save_chat_tokenizer

pytest.importorskip("mcp.client.client", reason="pip install 'mcp>=2'")
SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = f"{sys.executable} {SERVER}"


def call(tool: str, **arguments: object) -> str:
    text = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def add(name: str, value: object) -> str:
    return call("add", name=name, function=value)


@pytest.fixture
def tokenizer(tmp_path):
    return save_chat_tokenizer(tmp_path)


async def play(tokenizer, tools: McpTools, *script: list[str]) -> list[Trajectory | BaseException]:
    """Play an episode for each script, at the same time."""
    await tools.start(TrainConfig())
    async with playing(tokenizer, chat_prompt(tokenizer), *script) as (episodes, _, _):
        return await asyncio.gather(*map(tools, episodes), return_exceptions=True)


def results(tokenizer, played: Trajectory | BaseException) -> list[str]:
    """Return the results of tools that an episode saw."""
    assert isinstance(played, Trajectory), repr(played)
    parts = tokenizer.decode(played.tokens).split("<tool_response>")[1:]
    return [part.partition("</tool_response>")[0] for part in parts]


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if str(SERVER) in p.cmdline()]


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen]]:
    """Run the server behind a URL."""
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SERVER), "http", str(port)])
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(url)
                break
            time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.wait()


def test_episodes_have_servers_of_their_own_that_end_with_them(tokenizer) -> None:
    tools = McpTools([COMMAND], tool_parser="qwen25")
    one = [add("a", 1), add("b", 2), "done"]
    other = [add("c", 3), "done"]
    first, second = asyncio.run(play(tokenizer, tools, one, other))
    assert results(tokenizer, first) == ["a=1", "a=1 b=2"]
    assert results(tokenizer, second) == ["c=3"]
    assert not children()


def test_the_policy_reads_what_is_wrong_with_its_calls(tokenizer) -> None:
    wrong = [call("add", name="x"), call("subtract"), call("fail"), call("draw"), "done"]
    tools = McpTools([COMMAND], tools=["python"], tool_parser="qwen25")
    (played,) = asyncio.run(play(tokenizer, tools, wrong))
    found = results(tokenizer, played)
    assert found[0].startswith("error: ") and "function" in found[0]
    assert found[1] == "error: there is no tool 'subtract', only python, add, fail, draw, end"
    assert found[2].startswith("error: ") and found[3] == "[image]"


def test_an_episode_whose_server_ends_fails_and_the_next_does_not(tokenizer) -> None:
    tools = McpTools([COMMAND], tool_parser="qwen25")
    lost, kept = asyncio.run(play(tokenizer, tools, [call("end"), "done"], [add("a", 1), "done"]))
    assert isinstance(lost, ToolsLost) and "tool end does not answer" in str(lost)
    assert results(tokenizer, kept) == ["a=1"]


def test_a_cancelled_episode_leaves_no_server(tokenizer) -> None:
    tools = McpTools([COMMAND], tool_parser="qwen25")

    async def cancel() -> None:
        await tools.start(TrainConfig())
        script = [add("a", 1)] * 7 + ["done"]
        async with playing(tokenizer, chat_prompt(tokenizer), script) as (episodes, client, _):
            task = asyncio.create_task(tools(episodes[0]))
            while len(client.seen) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel())
    assert not children()


def test_servers_behind_a_url_serve_all_episodes(tokenizer) -> None:
    with serving() as (url, process):
        tools = McpTools([url], tool_parser="qwen25")
        played = asyncio.run(play(tokenizer, tools, [add("a", 1), "done"], [add("a", 1), "done"]))
        assert sorted(len(results(tokenizer, one)[0]) for one in played) == [3, 7]
        process.send_signal(signal.SIGKILL)
        process.wait()

        async def again() -> None:
            script = ["done"]
            async with playing(tokenizer, chat_prompt(tokenizer), script) as (episodes, _, _):
                with pytest.raises(ToolsLost, match=f"{url} does not answer"):
                    await tools(episodes[0])

        asyncio.run(again())


@pytest.mark.parametrize(
    "servers, message",
    [
        (["/nowhere/server"], "/nowhere/server does not answer: .*No such file"),
        ([f"{sys.executable} -c pass"], "-c pass does not answer: Connection closed"),
        ([COMMAND, COMMAND], "both have add"),
        (["http://127.0.0.1:9/mcp"], "http://127.0.0.1:9/mcp does not answer"),
    ],
)
def test_a_mistake_is_found_before_the_first_episode(servers, message) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(McpTools(servers).start(TrainConfig()))


def test_without_servers() -> None:
    with pytest.raises(ValueError, match="servers is empty"):
        McpTools([])
