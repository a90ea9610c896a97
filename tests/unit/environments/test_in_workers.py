"""Environments in the worker processes of a run: their data, their turns and their rewards."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from areal_lite.config.command_line import compose_config
from areal_lite.rollout.episode import Rollout
from areal_lite.rollout.pool import EpisodePool
from areal_lite.rollout.worker import Play
from areal_lite.servers.client import GenerationChunk, SamplingParams
from areal_lite.servers.fleet import Completion
from tests.unit.rollout.episodes import chat_prompt, save_chat_tokenizer

ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset

def load_environment(bonus):
    def right(completion, answer, info):
        return float(completion[-1]["content"] == answer) + bonus + info["bonus"]
    rows = [{"question": "1+1?", "answer": "2", "info": {"bonus": 0.5}}]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
"""
SERVER = f"{sys.executable} {Path(__file__).with_name('mcp_server.py')}"
ADD = '<tool_call>\n{"name": "add", "arguments": {"name": "x", "function": 1}}\n</tool_call>'
CASES = {
    "mcp.client.client": (
        [
            *("+task=addition", "rollout.workflow=areal_lite.environments.mcp:McpTools"),
            f"rollout.workflow_args={{servers: ['{SERVER}'], tool_parser: qwen25}}",
        ],
        *([ADD, "done"], None),
    ),
    "verifiers": (
        ["+task=verifiers", "data.args.environment=my_env", "data.args.arguments={bonus: 4}"],
        *(["2"], 5.5),
    ),
    "gymnasium": (
        [
            "+task=games",
            "data.args={game: gymnasium:FrozenLake-v1, size: 2, held_out: 1}",
            "+data.args.arguments={is_slippery: false, render_mode: ansi}",
        ],
        *(list("112122"), 1.0),
    ),
    "textarena": (
        ["+task=games", "data.args={game: textarena:GuessTheNumber-v0, size: 2, held_out: 1}"],
        *([f"[{number}]" for number in range(1, 21)], None),
    ),
}


@pytest.mark.parametrize("package", CASES)
def test_an_episode_in_a_worker(package: str, tmp_path: Path, monkeypatch) -> None:
    found = pytest.importorskip(package, reason=f"pip install {package}")
    if package == "verifiers" and not hasattr(found, "load_environment"):
        pytest.skip("pip install 'verifiers<0.3'")
    settings, said, expected = CASES[package]
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = save_chat_tokenizer(tmp_path)
    config = OmegaConf.to_object(compose_config("train", [f"model={tmp_path}", *settings]))
    config.rollout.workers = 1

    async def complete(left: list[str], tokens: np.ndarray, params: SamplingParams) -> Completion:
        ids = tokenizer.encode(left.pop(0), add_special_tokens=False) + [tokenizer.eos_ids[0]]
        chunk = GenerationChunk(
            tokens=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish_reason="stop",
        )
        return Completion([chunk], 1, "stop")

    async def main() -> Rollout:
        async with EpisodePool(config, ["train", "eval"]) as pool:
            if package == "mcp.client.client":  # its prompts are not the environment's
                prompt = chat_prompt(tokenizer)
            else:
                prompt = await pool.prompt("train", 0)
            params = SamplingParams(4000, 1.0, tokenizer.eos_ids)
            play = Play(0, [0], prompt, params)
            (result,) = await pool.play("p", play, [partial(complete, list(said))])
            return result

    result = asyncio.run(main())
    assert not result.failure, result
    (trace,) = result.traces
    if package == "mcp.client.client":
        assert "<tool_response>x=1</tool_response>" in tokenizer.decode(trace.tokens)
    elif expected is None:  # the number is one of the first ten, or it is not found in time
        assert trace.reward in (0.0, 1.0)
    else:
        assert trace.reward == expected
    assert "my_env" not in sys.modules, "code of the user was imported here"
