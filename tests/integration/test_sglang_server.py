"""A real SGLang server: exact log-probs, interruption with version spans, and no orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
import torch

from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rollout.episode import Episode, single_turn
from areal_lite.servers.client import GenerationChunk, SamplingParams, SGLangClient
from areal_lite.servers.fleet import Fleet
from areal_lite.system.network import free_port
from areal_lite.trajectory import Trajectory
from tests.processes import running

LONG = 1500  # tokens: much longer than the other requests
pytestmark = pytest.mark.timeout(300)


class Http:
    def __init__(self, url: str):
        self.url = url

    async def __aenter__(self) -> Http:
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def post(self, path: str, **body: object) -> dict:
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, (path, response.status, await response.text())
            return await response.json() if response.content_type == "application/json" else {}

    async def generate(
        self,
        input_ids: list[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        ignore_eos: bool = True,
    ) -> dict:
        params = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
        }
        return await self.post(
            "/generate", input_ids=input_ids, sampling_params=params, return_logprob=True
        )


def sampled(answer: dict) -> tuple[list[int], list[float]]:
    """Return the token ids and log-probs of an answer of /generate."""
    entries = answer["meta_info"]["output_token_logprobs"]
    return [e[1] for e in entries], [e[0] for e in entries]


@pytest.fixture(scope="session")
def reference(tiny_model: str):
    """log-probs [n] of `completion` after `prompt` at a temperature, by transformers in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()

    @torch.no_grad()
    def logprobs(prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
        logits = (
            model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
        )
        return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].float()

    return logprobs


also_speculating = pytest.mark.parametrize("sglang_server", [None, "history"], indirect=True)


@also_speculating
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(sglang_server, reference, temperature):
    # Mixed lengths, and two prompts that share a prefix: the second finds it in the radix cache.
    prompts = [[5, 6, 7], list(range(2, 60)), list(range(2, 50)) + [9, 9], [11] * 17]

    async def run() -> list[dict]:
        async with Http(sglang_server.url) as http:
            return await asyncio.gather(
                *(http.generate(p, n, temperature) for p, n in zip(prompts, (40, 5, 33, 64)))
            )

    for prompt, answer, count in zip(prompts, asyncio.run(run()), (40, 5, 33, 64)):
        tokens, logprobs = sampled(answer)
        assert len(tokens) == count and tokens == answer["output_ids"]
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        # Logits reach 40 here, where neighbouring float32 numbers are 4e-6 apart.
        torch.testing.assert_close(
            torch.tensor(logprobs), reference(prompt, tokens, temperature), atol=2e-5, rtol=0
        )


@also_speculating
def test_stops_at_the_end_token(sglang_server):
    async def run() -> list[dict]:
        async with Http(sglang_server.url) as http:
            return await asyncio.gather(
                *(http.generate([5, 6, i], 500, ignore_eos=False) for i in range(2, 18))
            )

    stopped = [a for a in asyncio.run(run()) if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert stopped and all(sampled(a)[0][-1] == 1 and 1 not in sampled(a)[0][:-1] for a in stopped)


async def interrupt(http: Http, server, mode: str, version: int) -> dict:
    """Generate `LONG` tokens, and push the same weights as `version` in the middle."""
    request = asyncio.create_task(http.generate([5, 6, 7, 8], LONG))
    await asyncio.sleep(0.05)
    # First come, first served: when this is done, the long request is well under way.
    await http.generate([9], 8)
    await http.post("/pause_generation", mode=mode)
    try:
        body = {
            "model_path": server.model,
            "weight_version": str(version),
            "flush_cache": mode != "in_place",
        }
        assert (await http.post("/update_weights_from_disk", **body))["success"]
    finally:
        await http.post("/continue_generation")
    return await request


@also_speculating
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_push_leaves_version_spans(sglang_server, reference, mode):
    async def run() -> tuple[int, dict]:
        async with Http(sglang_server.url) as http:
            before = int((await http.generate([5], 1))["meta_info"]["weight_version"])
            return before, await interrupt(http, sglang_server, mode, before + 1)

    before, answer = asyncio.run(run())
    tokens, logprobs = sampled(answer)
    spans = answer["meta_info"]["weight_versions"]
    assert [s["version"] for s in spans] == [str(before), str(before + 1)]
    assert (spans[0]["start"], spans[1]["end"]) == (0, LONG) and spans[0]["end"] == spans[1][
        "start"
    ]
    # The weights were the same, so the cache that was kept or computed again must give the same
    # numbers. float32 over 1500 tokens is exact to about 1e-5; a token that met a wrong cache is
    # off by a thousand times as much.
    torch.testing.assert_close(
        torch.tensor(logprobs), reference([5, 6, 7, 8], tokens, 1.0), atol=5e-5, rtol=0
    )


def computed_by_groups(url: str) -> list[int]:
    """Return the prompt tokens that each of two groups of eight requests computes, in order."""
    prompts = [torch.randint(2, 98, (100,)).tolist() for _ in range(2)]

    async def run() -> list[dict]:
        async with Http(url) as http:
            # It keeps the server busy until all have arrived.
            busy = asyncio.create_task(http.generate(list(range(2, 98)) * 10, 1))
            answers = await asyncio.gather(*(http.generate(p, 3) for p in prompts * 8))
            await busy
            return answers

    return sorted(100 - answer["meta_info"]["cached_tokens"] for answer in asyncio.run(run()))


ONCE = [4] * 14 + [100] * 2
"""The cache has pages of 16 tokens: 96 are shared."""


@also_speculating
def test_a_group_computes_its_prompt_once(sglang_server):
    assert computed_by_groups(sglang_server.url) == ONCE


@also_speculating
def test_abort_returns_what_there_is(sglang_server):
    async def run() -> dict:
        async with Http(sglang_server.url) as http:
            version = int((await http.generate([5], 1))["meta_info"]["weight_version"])
            return await interrupt(http, sglang_server, "abort", version + 1)

    answer = asyncio.run(run())
    tokens, logprobs = sampled(answer)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(tokens) < LONG and len(logprobs) == len(tokens)


def test_a_prefix_cached_under_older_weights_serves_no_newer_version(
    sglang_server, tiny_model, tmp_path
):
    """A push in mode `in_place` keeps the old cache. The cache key (the version) excludes it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    other = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for parameter in other.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path)
    prompt, params = np.arange(2, 66, dtype=np.int32), SamplingParams(8, 1.0, (1,))

    async def push(http: Http, model: str, version: int, mode: str) -> None:
        await http.post("/pause_generation", mode=mode)
        flush = mode != "in_place"
        await http.post(
            "/update_weights_from_disk",
            model_path=model,
            weight_version=str(version),
            flush_cache=flush,
        )
        await http.post("/continue_generation")

    async def run() -> list[GenerationChunk]:
        client = SGLangClient(60)
        async with Http(sglang_server.url) as http:
            old = await client.weight_version(sglang_server.info)

            async def ask(rid: str, version: int) -> GenerationChunk:
                return await client.generate(
                    sglang_server.info, prompt, params, f"prefix-{rid}", str(version)
                )

            before = await ask("before", old)
            await push(http, str(tmp_path), old + 1, "in_place")
            chunks = [before, await ask("after", old + 1), await ask("trap", old)]
            await push(http, tiny_model, old + 2, "retract")
            await client.close()
            return chunks

    @torch.no_grad()
    def expected(chunk: GenerationChunk) -> torch.Tensor:
        logits = (
            other(torch.tensor([[*prompt, *chunk.tokens]])).logits[0, len(prompt) - 1 : -1].double()
        )
        return (
            logits.log_softmax(-1)
            .gather(1, torch.tensor(chunk.tokens).long()[:, None])[:, 0]
            .float()
        )

    before, after, trap = asyncio.run(run())
    torch.testing.assert_close(torch.from_numpy(after.logprobs), expected(after), atol=5e-5, rtol=0)
    # `trap` has the same weights as `after`, over the older cache: this is the danger.
    for chunk in (before, trap):
        assert (torch.from_numpy(chunk.logprobs) - expected(chunk)).abs().max() > 1e-2


@pytest.mark.parametrize("part", [{"top_p": 1e-6}, {"top_k": 1}])
def test_the_likeliest_part_of_the_vocabulary_is_one_token(sglang_server, reference, part):
    """It is the greedy token then, and its log-prob is still of the whole vocabulary."""
    prompt = np.array([5, 6, 7, 8], np.int32)
    whole = SamplingParams(30, 1.0, (), evaluates=True)

    async def run() -> list[GenerationChunk]:
        async with SGLangClient(60) as client:
            version = str(await client.weight_version(sglang_server.info))
            ways = {"greedy": replace(whole, temperature=0.0), "part": replace(whole, **part)}
            return [
                await client.generate(sglang_server.info, prompt, params, f"{part}-{way}", version)
                for way, params in ways.items()
            ]

    greedy, sampled_part = asyncio.run(run())
    assert sampled_part.tokens.tolist() == greedy.tokens.tolist()
    expected = reference(prompt.tolist(), greedy.tokens.tolist(), 1.0)
    torch.testing.assert_close(torch.from_numpy(sampled_part.logprobs), expected, atol=2e-5, rtol=0)


def test_sglang_takes_no_stop_texts(sglang_server):
    """Servers have no tokenizer (skip_tokenizer_init): a Transcript looks for the texts."""
    params = {"max_new_tokens": 4, "stop": ["ab"]}

    async def run() -> tuple[int, str]:
        url = f"{sglang_server.url}/generate"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"input_ids": [5, 6], "sampling_params": params}) as response,
        ):
            return response.status, await response.text()

    status, text = asyncio.run(run())
    assert status == 400 and "unavailable when skip_tokenizer_init=True" in text


def test_a_text_ends_an_answer_through_interruptions(sglang_server, reference):
    """The tokens and log-probs are the first ones of the answer that nothing ends or interrupts."""
    tokenizer, prompt = Tokenizer(sglang_server.model), [5, 6, 7, 8]
    pauses = 0

    async def answer(http: Http, stop: tuple[str, ...], pausing: bool) -> Trajectory:
        nonlocal pauses
        async with SGLangClient(60) as client:
            fleet = Fleet(client, lambda: [sglang_server.info], lambda: None)
            fleet.router.version = await client.weight_version(sglang_server.info)
            watching = asyncio.create_task(fleet.watch())
            session = await fleet.open_session("text")
            params = SamplingParams(400, 0.0, (), tokenizer.vocab_size, stop=stop)
            episode = Episode(
                prompt=Prompt(prompt_id="p", tokens=prompt, answer="", text=""),
                sample_index=0,
                group_id=0,
                tokenizer=tokenizer,
                params=params,
                clock=time.time,
                complete=partial(fleet.complete, session),
            )
            playing = asyncio.create_task(single_turn(episode))
            while pausing and not playing.done():
                # First come, first served: when this is done, the answer has some more tokens.
                await http.generate([9], 20)
                await http.post("/pause_generation", mode="abort")
                await http.post("/continue_generation")
                pauses += 1
            watching.cancel()
            return await playing

    async def run() -> tuple[Trajectory, Trajectory, str]:
        async with Http(sglang_server.url) as http:
            whole = await answer(http, (), pausing=False)
            text = tokenizer.decode(whole.tokens[4:])
            at = next(i for i in range(150, 390) if text[i : i + 3] not in text[: i + 2])
            stop = text[at : at + 3]
            return whole, await answer(http, (stop, "never"), pausing=True), stop

    whole, ended, stop = asyncio.run(run())
    tokens = ended.tokens[4:].tolist()
    assert pauses > 1 and ended.requests > 1
    assert ended.finish_reason == "stop" and tokenizer.decode(tokens).endswith(stop)
    assert stop not in tokenizer.decode(tokens[:-1])
    assert tokens == whole.tokens[4 : 4 + len(tokens)].tolist()
    expected = reference(prompt, tokens, 1.0)
    torch.testing.assert_close(
        torch.from_numpy(ended.behavior_logprobs[4:]), expected, atol=2e-5, rtol=0
    )


PARENT = """
import sys, time
from pathlib import Path
from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess

model, port, log = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
server = ServerProcess(ServerConfig(), model, name="orphan", port=port, seed=1, log_path=log)
server.start()
print(server.info.pid, flush=True)
time.sleep(600)
"""


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return result


def test_a_server_that_stalled_answers_on_the_connections_that_it_has(sglang_server):
    """A stall of more than the 5 s after which uvicorn would close an idle connection."""
    params = SamplingParams(3, temperature=1.0, stop_token_ids=())
    prompt = np.arange(2, 9, dtype=np.int32)

    async def run() -> GenerationChunk:
        async with SGLangClient(60) as client:
            await client.generate(sglang_server.info, prompt, params, "before", "0")
            leader = psutil.Process(sglang_server.info.pid)
            leader.suspend()
            try:
                asked = asyncio.create_task(
                    client.generate(sglang_server.info, prompt, params, "during", "0")
                )
                await asyncio.sleep(6)
            finally:
                leader.resume()
            return await asked

    assert len(asyncio.run(run()).tokens) == 3


def test_a_server_does_not_load_megatron(sglang_server) -> None:
    """Megatron-core warns when it is imported without Transformer Engine."""
    assert "megatron" not in Path(f"/proc/{sglang_server.info.pid}/fd/1").read_text()


def test_nothing_survives_a_killed_parent(tiny_model, tmp_path):
    command = [
        sys.executable,
        "-c",
        PARENT,
        tiny_model,
        str(free_port()),
        str(tmp_path / "server.log"),
    ]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    server = psutil.Process(int(parent.stdout.readline()))
    try:
        assert wait_until(lambda: len(server.children(recursive=True)) >= 2, 120), (
            "the scheduler and the detokenizer did not start"
        )
        family = [p.pid for p in (server, *server.children(recursive=True))]
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not running(family), 15), running(family)
    finally:
        parent.kill()
        if server.is_running():
            os.killpg(server.pid, signal.SIGKILL)
