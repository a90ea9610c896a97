"""A judge whose model the run serves itself, with a real server."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from areal_lite.rewards.worker import load_reward_function
from areal_lite.servers.registry import announced_servers

# The model writes at random: sooner or later one of its digits is the score.
RUBRIC = """---
model: {model}
server: {{}}
score: "[0-9]"
range: [0, 9]
request: {{max_tokens: 32}}
attempts: 50
---
{{completion}}
"""


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_its_server_starts_with_the_run_again_when_it_dies_and_ends_with_it(
    tiny_model, tmp_path: Path, dies: bool
) -> None:
    (tmp_path / "rubric.md").write_text(RUBRIC.format(model=tiny_model))
    make = load_reward_function(f"areal_lite.workflows.judge:{tmp_path}/rubric.md")

    async def verdicts() -> list[int]:
        async with make(1, 60.0, tmp_path / "judge.sqlite") as judge:
            (folder,) = tmp_path.glob("judge-*")
            (first,) = announced_servers(folder)
            assert 0 <= await judge.verdict({"completion": "1"}, lambda: None) <= 1
            if dies:
                os.killpg(first.pid, signal.SIGKILL)
            # Asked at once, while the server is still announced.
            assert 0 <= await judge.verdict({"completion": "2"}, lambda: None) <= 1
            (second,) = announced_servers(folder)
        return [first.pid, second.pid]

    pids = set(asyncio.run(verdicts()))
    assert len(pids) == 1 + dies
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)


@pytest.mark.slow  # as of any server pool
def test_a_server_that_cannot_start_ends_the_judge(tiny_model, tmp_path: Path) -> None:
    rubric = RUBRIC.format(model=tiny_model).replace("{}", "{args: {no_such_option: 1}}")
    (tmp_path / "rubric.md").write_text(rubric)
    make = load_reward_function(f"areal_lite.workflows.judge:{tmp_path}/rubric.md")
    judge = make(1, 60.0, tmp_path / "judge.sqlite")
    with pytest.raises(RuntimeError, match="unrecognized arguments: --no-such-option"):
        asyncio.run(judge.start())
