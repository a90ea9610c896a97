"""Decoding with drafts from earlier answers against plain decoding.

    python -m benchmarks.speculation --model BASE --trained RUN/checkpoints/hf

BASE is a chat model, and the second one is that model after training on sums (examples/chat_model).
A server with drafts (server.args.speculative_algorithm=history) and one without have the same
requests in turn: groups of samples for prompts that come again in each epoch, with 1, 4, 8 and 32
requests at once. The first epoch, which only fills the history, does not count. A ratio is the
median of the epochs, with the lowest and the highest, of tokens a second: by the clock,
and by the server's processor time, which other load of the machine changes less.

    python -m benchmarks.speculation --exact

samples a million tokens of a small random model with drafts, and compares them with the
distributions that transformers computes in float64: where each token's sample lies in the
cumulative distribution is uniform (chi-square, 99 degrees of freedom).

Both write results/speculation.json.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.system.network import free_port
from benchmarks.server_speed import make_model, processor_seconds

RESULTS = Path(__file__).with_name("results") / "speculation.json"
AT_ONCE = (1, 4, 8, 32)
EPOCHS, PROMPTS, SAMPLES, TOKENS = 9, 4, 8, 32
ANSWER, ANSWERS, TEMPERATURE = 40, 25_000, 0.1


class Answer(NamedTuple):
    tokens: list[int]
    steps: int  # in which the server decoded it


class Speed(NamedTuple):
    per_second: float
    per_processor_second: float
    per_step: float


@contextmanager
def servers(
    model: str, *algorithms: str | None, device: str = "cpu", **args: Any
) -> Iterator[list[ServerProcess]]:
    """Start a server of `model` for each algorithm for speculation, and stop them.

    `args` are more options of SGLang. Where a GPU drafts, scheduling does not overlap.
    """
    args = {"max_total_tokens": 8192} | args
    with tempfile.TemporaryDirectory() as folder:
        started = [
            ServerProcess(
                ServerConfig(
                    device=device,
                    args=args
                    | {"speculative_algorithm": algorithm}
                    | ({"disable_overlap_schedule": True} if algorithm == "NGRAM" else {}),
                ),
                model,
                name=algorithm or "plain",
                port=free_port(),
                seed=1,
                log_path=Path(folder, f"{algorithm}.log"),
            )
            for algorithm in algorithms
        ]
        try:
            for server in started:
                server.start()
            asyncio.run(_ready(started))
            yield started
        finally:
            for server in started:
                server.stop()


async def _ready(started: list[ServerProcess]) -> None:
    await asyncio.gather(*(server.wait_ready() for server in started))


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], rid: str, params: dict[str, Any]
) -> Answer:
    body = {"rid": rid, "input_ids": prompt, "sampling_params": params, "return_logprob": True}
    async with session.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
    tokens = answer["output_ids"]
    return Answer(tokens, answer["meta_info"].get("spec_verify_ct") or len(tokens))


async def speed(
    server: ServerProcess,
    prompts: list[list[int]],
    at_once: int,
    epoch: int,
    end: int,
    tokens: int = TOKENS,
) -> Speed:
    """Ask for all samples of all prompts, `at_once` at a time."""
    params = {"max_new_tokens": tokens, "stop_token_ids": [end], "skip_special_tokens": False}
    free = asyncio.Semaphore(at_once)
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(1800)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:

        async def one(number: int, sample: int) -> Answer:
            async with free:
                rid = f"{at_once}.{epoch}-{number}-{sample}-0-0"
                return await ask(session, server.url, prompts[number], rid, params)

        start, busy = time.perf_counter(), processor_seconds(server)
        pairs = [(n, s) for n in range(len(prompts)) for s in range(SAMPLES)]
        answers = await asyncio.gather(*(one(*pair) for pair in pairs))
        seconds, used = time.perf_counter() - start, processor_seconds(server) - busy
    count = sum(len(answer.tokens) for answer in answers)
    return Speed(count / seconds, count / used, count / sum(a.steps for a in answers))


def sums(model: str, seed: int) -> tuple[list[list[int]], int]:
    """Return prompts that ask for sums, and the token that ends an answer."""
    tokenizer, source = AutoTokenizer.from_pretrained(model), random.Random(seed)
    prompts = []
    for _ in range(PROMPTS):
        a, b = source.randrange(2, 40), source.randrange(2, 40)
        asked = [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}]
        chat = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
        prompts.append(chat["input_ids"])
    return prompts, tokenizer.eos_token_id


def compare(model: str) -> list[dict[str, Any]]:
    """Return the ratios of speeds of a model for each number of requests at once."""
    with servers(model, None, "history") as both:
        return [ratios(both, at_once, *sums(model, seed=at_once)) for at_once in AT_ONCE]


def ratios(
    both: list[ServerProcess],
    at_once: int,
    prompts: list[list[int]],
    end: int,
    tokens: int = TOKENS,
) -> dict[str, Any]:
    """Return the speed of the second server over that of the first, which does not draft.

    Each load has other prompts, so the history of the one before does not help.
    """
    prompts = prompts[: max(at_once // 2, 1)]  # one at a time takes long
    pairs = [
        [asyncio.run(speed(server, prompts, at_once, epoch, end, tokens)) for server in both]
        for epoch in range(EPOCHS)
    ][1:]
    row: dict[str, Any] = {"at_once": at_once}
    row["tokens_per_step"] = round(statistics.median(h.per_step for _, h in pairs), 2)
    for name in ("per_second", "per_processor_second"):
        found = sorted(getattr(h, name) / getattr(o, name) for o, h in pairs)
        row[f"{name}_ratio"] = [
            round(x, 2) for x in (statistics.median(found), found[0], found[-1])
        ]
    print(json.dumps(row), flush=True)
    return row


def exact() -> dict[str, float]:
    """Return the chi-square of the places of tokens in their distributions, and their number."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), 64, 2, 32)
        prompts = [list(range(2 + i, 12 + i)) for i in range(25)]
        with servers(model, "history") as (server,):
            answers = asyncio.run(_sample(server, prompts))
        places, steps = _places(model, prompts, answers), sum(a.steps for _, a in answers)
    counts = np.histogram(places, bins=100, range=(0, 1))[0]
    mean = len(places) / 100
    square = float(((counts - mean) ** 2 / mean).sum())
    found = {"tokens": len(places), "tokens_per_step": len(places) / steps, "chi_square_99": square}
    print(json.dumps(found), flush=True)
    return found


async def _sample(server: ServerProcess, prompts: list[list[int]]) -> list[tuple[int, Answer]]:
    params = {"max_new_tokens": ANSWER, "temperature": TEMPERATURE, "ignore_eos": True}
    free = asyncio.Semaphore(8)
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(3600)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:

        async def one(number: int) -> tuple[int, Answer]:
            prompt = number % len(prompts)
            async with free:
                rid = f"x-{prompt}-{number}-0-0"
                return prompt, await ask(session, server.url, prompts[prompt], rid, params)

        return await asyncio.gather(*map(one, range(ANSWERS)))


@torch.no_grad()
def _places(folder: str, prompts: list[list[int]], answers: list[tuple[int, Answer]]) -> np.ndarray:
    """Return a random place of each token within its part of [0, 1], which p divides up."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    source, places = torch.Generator().manual_seed(0), []
    for start in range(0, len(answers), 500):
        some = answers[start : start + 500]
        rows = torch.tensor([prompts[p] + a.tokens for p, a in some])
        first = len(prompts[0])
        chances = (model(rows).logits[:, first - 1 : -1] / TEMPERATURE).softmax(-1)
        upper = chances.cumsum(-1).gather(-1, rows[:, first:, None])[..., 0]
        own = chances.gather(-1, rows[:, first:, None])[..., 0]
        random_part = torch.rand(own.shape, generator=source, dtype=torch.float64)
        places.append((upper - own * random_part).flatten().numpy())
    return np.concatenate(places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--trained")
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.exact:
        result["exact"] = exact()
    for name in ("model", "trained"):
        if folder := getattr(options, name):
            result[name] = compare(folder)
    RESULTS.write_text(json.dumps({"cores": os.cpu_count()} | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
