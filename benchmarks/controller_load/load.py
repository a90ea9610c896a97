"""Describe the load of a measurement: requests in flight, lengths and times of answers."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.data.prompts import Prompt
from areal_lite_quickstart.make_model import build_char_tokenizer

GROUP_SIZE = 8
PROMPT_TOKENS = 40
LONGEST = 5
"""Longest answer, in means."""


@cache
def _client(base_url: str) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="one per episode", timeout=None)


async def agent(base_url: str, api_key: str, prompt: Prompt) -> None:
    """Ask once, with OpenAI's client."""
    policy = _client(base_url).with_options(api_key=api_key)
    question = [{"role": "user", "content": prompt.text}]
    await policy.chat.completions.create(model="policy", messages=question)


@dataclass(frozen=True)
class Load:
    """Requests in flight, and the answers of the server.

    An answer has `mean_tokens` on average and takes `mean_s` seconds. A step has `batch_groups`
    groups of GROUP_SIZE trajectories. With `agent`, a client of OpenAI asks for each answer.
    """

    in_flight: int
    mean_tokens: int
    mean_s: float
    batch_groups: int
    max_staleness: int
    agent: bool = False

    @property
    def max_tokens(self) -> int:
        return LONGEST * self.mean_tokens

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `python -m benchmarks.controller_load.server`, but the run."""
        return [str(self.mean_tokens), str(self.mean_s)]

    def config(self, folder: Path) -> TrainConfig:
        """Return the configuration of a run, and write its tokenizer to <folder>/model."""
        build_char_tokenizer().save_pretrained(folder / "model")
        config = TrainConfig(model=str(folder / "model"))
        config.data.source = "addition"
        config.reward.function = "areal_lite_quickstart.addition:addition_reward"
        if self.agent:
            config.rollout.workflow = "areal_lite.workflows.agent:Agent"
            config.rollout.workflow_args = {"agent": "benchmarks.controller_load.load:agent"}
        config.rollout.group_size = GROUP_SIZE
        config.rollout.max_new_tokens = self.max_tokens
        config.rollout.max_concurrent = self.in_flight
        config.trainer.batch_groups = self.batch_groups
        config.trainer.steps = 10**6
        config.buffer.max_staleness = self.max_staleness
        config.buffer.freshness = "eager"
        config.eval.problems = 0
        return config
