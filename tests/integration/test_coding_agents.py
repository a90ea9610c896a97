"""Coding agents, unmodified: each edits a file as the policy says, and the task is one trace.

They are programs from npm that CI does not install: @anthropic-ai/claude-code, @openai/codex,
opencode-ai and @qwen-code/qwen-code, found on the PATH.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from areal_lite.workflows.endpoint import server
from tests.unit.rollout.episodes import save_chat_tokenizer
from tests.unit.workflows.test_conversations import asking, assert_recorded

TASK = "Change hello to bye in a.py."
EDIT = "sed -i s/hello/bye/ a.py"
BUDGET = 400_000  # the instructions have tens of thousands of characters, which are tokens here


class Program(NamedTuple):
    """A coding agent: its words, its environment by address and key, and its tool for a command."""

    words: list[str]
    environment: Callable[[str, str], dict[str, str]]
    tool: str
    arguments: dict[str, Any]  # besides the command
    command: str = "command"  # its name among the arguments
    titles: int = 0  # requests of their own, for a title of the conversation


def openai(address: str, key: str) -> dict[str, str]:
    return {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"}


def claude(address: str, key: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": address.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": "policy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def codex(address: str, key: str) -> dict[str, str]:
    return {"POLICY_URL": address, "POLICY_KEY": key}


def opencode(address: str, key: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": address, "apiKey": key},
        "models": {"policy": {}},
    }
    settings = {"provider": {"areal": provider}, "model": "areal/policy", "autoupdate": False}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}


PROVIDER = 'name="areal",base_url="{POLICY_URL}",env_key="POLICY_KEY",wire_api="responses"'
PROGRAMS = {
    "claude": Program(
        ["claude", "-p", TASK, "--allowedTools", "Bash"], claude, "Bash", {"description": "Do it"}
    ),
    "codex": Program(
        [
            *("codex", "exec", "--skip-git-repo-check"),
            "--dangerously-bypass-approvals-and-sandbox",
            *("-c", 'model="policy"', "-c", 'model_provider="areal"'),
            *("-c", f"model_providers.areal={{{{{PROVIDER}}}}}"),
            TASK,
        ],
        codex,
        "exec_command",
        {},
        "cmd",
    ),
    "opencode": Program(
        ["opencode", "run", TASK], opencode, "bash", {"description": "Do it"}, titles=1
    ),
    "qwen": Program(
        ["qwen", "--auth-type", "openai", "--yolo", "-p", TASK],
        openai,
        "run_shell_command",
        {"is_background": False},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.timeout(120)
def test_a_task_is_one_trace(name: str, tmp_path: Path, monkeypatch) -> None:
    program = PROGRAMS[name]
    if shutil.which(program.words[0]) is None:
        pytest.skip(f"{program.words[0]} is not installed")
    refused: list[tuple] = []
    refuse = server._refusal
    monkeypatch.setattr(
        server, "_refusal", lambda *words: refused.append(words[1:]) or refuse(*words)
    )
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir(), home.mkdir()
    (work / "a.py").write_text("print('hello')\n")
    calls = [
        json.dumps({"name": program.tool, "arguments": {program.command: say, **program.arguments}})
        for say in ("ls", EDIT)
    ]
    script = ["A title"] * program.titles
    script += [*(f"I run this.<tool_call>{call}</tool_call>" for call in calls), "Done."]

    async def main() -> None:
        async with asking(save_chat_tokenizer(tmp_path / "model"), script, 16, BUDGET) as asker:
            client = asker.client
            given = program.environment(str(client.base_url).rstrip("/"), client.api_key)
            await asyncio.to_thread(
                subprocess.run,
                [word.format(**given) for word in program.words],
                cwd=work,
                env={"PATH": os.environ["PATH"], "HOME": str(home), **given},
                stdin=subprocess.DEVNULL,
                check=True,
                timeout=100,
            )
            traces = asker.conversations.traces(0.5)
        assert_recorded(traces, asker.scripted)
        assert len(traces) == 1 + program.titles
        assert len(asker.scripted.seen) == len(script)

    asyncio.run(main())
    assert (work / "a.py").read_text() == "print('bye')\n"
    # Some look for what else the address serves.
    assert [words for words in refused if words[0] != 404] == []
