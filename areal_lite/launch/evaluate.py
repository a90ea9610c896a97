"""`areal-lite eval` and `areal-lite generate`: servers of a checkpoint for as long as the questions last. No controller, no trainer."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.config import EvalCommandConfig, GenerateConfig, ServerConfig, save_config
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.evaluation import score_problems
from areal_lite.data.prompts import Prompt, load_prompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.launch.roles import RoleFailed
from areal_lite.launch.server_pool import ServerPool, server_pool
from areal_lite.rewards.pool import RewardPool
from areal_lite.rollout.runner import load_workflow, started
from areal_lite.run_dir.paths import SUMMARY_FILE
from areal_lite.servers.client import SGLangClient
from areal_lite.servers.completion import SamplingParams
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.registry import announced_servers, mark_unhealthy
from areal_lite.system.files import write_json
from areal_lite.system.gpus import divide_gpus, resolve_device, visible_gpus

_SHOWN = 5


def run(config: EvalCommandConfig | GenerateConfig) -> int:
    """Start servers, ask, stop them. Returns the exit status."""
    run_dir = Path(config.run_dir)
    save_config(config, run_dir)
    ask = _evaluate if isinstance(config, EvalCommandConfig) else _generate
    try:
        with server_pool(
            config.server,
            config.model,
            config.seed,
            run_dir,
            dict(enumerate(placed(config.server))),
            {},
        ) as pool:
            pool.wait_ready()
            asyncio.run(_unless_gone(ask(config, run_dir), pool))
    except (RuntimeError, TimeoutError) as error:
        print(f"areal-lite: {error}", file=sys.stderr)
        return 1
    return 0


async def _unless_gone(asking: Coroutine[Any, Any, None], pool: ServerPool) -> None:
    """Wait for `asking`, but not longer than there are servers to ask. Raises RoleFailed."""
    task = asyncio.ensure_future(asking)
    while not task.done():
        await asyncio.wait([task], timeout=1.0)
        try:
            pool.check()
        except RoleFailed:
            task.cancel()
            raise
    task.result()


def placed(server: ServerConfig) -> list[list[str]]:
    """GPUs of each server: there is no trainer to share them with."""
    return divide_gpus(
        visible_gpus() if resolve_device(server.device) == "cuda" else [],
        server.count,
        server.tensor_parallel,
    )


async def _evaluate(config: EvalCommandConfig, run_dir: Path) -> None:
    """Prints accuracies and writes them to summary.json."""
    rewards = RewardPool(config.reward.function, config.reward.workers, config.reward.timeout_s)
    await rewards.start()
    workflow = load_workflow(config.rollout)
    async with _Asking(config, run_dir) as asking, started(workflow, config):
        parts = Dependencies(
            None,
            load_prompts(config.data, config.model, "eval"),
            Tokenizer(config.model),
            rewards,
            None,
            time.time,
        )
        scores = await score_problems(
            config.rollout, parts, asking.fleet, workflow, config.problems, config.samples, "eval"
        )
    await rewards.close()
    result = {
        "model": config.model,
        "problems": len(scores.rewards),
        "samples": config.samples,
        "greedy": scores.greedy,
        "pass_at_k": scores.pass_at_powers(),
        "failures": scores.failures,
    }
    write_json(run_dir / SUMMARY_FILE, result)
    print(
        f"{len(scores.rewards)} held-out problems: greedy {scores.greedy:.3f}"
        + "".join(f", pass@{k} {p:.3f}" for k, p in result["pass_at_k"].items())
    )
    print(run_dir / SUMMARY_FILE)


async def _generate(config: GenerateConfig, run_dir: Path) -> None:
    """Prints each prompt with its completions."""
    tokenizer = Tokenizer(config.model)
    params = SamplingParams(
        config.rollout.max_new_tokens, config.rollout.temperature, tokenizer.eos_ids
    )
    async with _Asking(config, run_dir) as asking:

        async def one(prompt: Prompt, sample: int) -> str:
            server = await asking.fleet.reserve(1)
            completion = await asking.fleet.complete(
                np.asarray(prompt.tokens, np.int32), params, f"{prompt.prompt_id}-{sample}", server
            )
            return f"[{completion.finish_reason}, {len(completion.tokens)} tokens]\n{tokenizer.decode(completion.tokens)}"

        for prompt in _prompts(config, tokenizer):
            texts = await asyncio.gather(*(one(prompt, sample) for sample in range(config.samples)))
            print(
                f"--- {prompt.text}"
                + (f"   (right answer: {prompt.answer})" if prompt.answer else "")
            )
            print("\n".join(texts))


def _prompts(config: GenerateConfig, tokenizer: Tokenizer) -> list[Prompt]:
    if not config.prompts:
        held_out = load_prompts(config.data, config.model, "eval")
        return [held_out[i] for i in range(min(_SHOWN, held_out.num_prompts or _SHOWN))]
    chat = config.data.chat and config.data.source != "addition"
    encode = (
        (lambda text: tokenizer.chat([{"role": "user", "content": text}]))
        if chat
        else tokenizer.encode
    )
    return [
        Prompt(prompt_id=f"prompt{i}", tokens=encode(text), answer="", text=text)
        for i, text in enumerate(config.prompts)
    ]


class _Asking:
    """A fleet of the announced servers, for the length of an `async with`."""

    def __init__(self, config: EvalCommandConfig | GenerateConfig, run_dir: Path):
        self.config, self.run_dir = config, run_dir

    async def __aenter__(self) -> _Asking:
        self.client = SGLangClient(self.config.server.health_timeout_s)
        server = self.config.server
        told = partial(mark_unhealthy, self.run_dir)
        self.fleet = Fleet(
            self.client,
            lambda: announced_servers(self.run_dir),
            lambda: None,
            told,
            server.health_interval_s,
        )
        self.watching = asyncio.create_task(self.fleet.watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.watching.cancel()
        await self.client.close()
