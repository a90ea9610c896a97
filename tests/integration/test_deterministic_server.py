"""Servers with `server.deterministic`: the same tokens beside any others and on any server.

All of it also holds where the first server speculates and the second does not. The first one also
retracts a request now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import aiohttp
import numpy as np
import pytest

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.servers.client import GenerationChunk, SamplingParams, SGLangClient
from areal_lite.servers.fleet import Completion
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.network import free_port

NUM, TOKENS = 12, 100
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=[None, pytest.param("history", marks=pytest.mark.slow)])
def servers(request, tiny_model: str, current_entry_points, tmp_path_factory):
    """Two servers of the same model, with different seeds of their own; quick tests have one."""
    logs = tmp_path_factory.mktemp("deterministic")
    processes = [
        ServerProcess(
            ServerConfig(deterministic=True, args={"speculative_algorithm": algorithm}),
            tiny_model,
            name=f"s{seed}",
            port=free_port(),
            seed=seed,
            log_path=logs / f"s{seed}.log",
            environment=current_entry_points | ({"SGLANG_TEST_RETRACT": "1"} if algorithm else {}),
        )
        for seed, algorithm in ((1, request.param), (2, None))[: 2 if request.param else 1]
    ]

    async def ready() -> None:
        await asyncio.gather(*(process.wait_ready() for process in processes))

    try:
        for process in processes:
            process.start()
        asyncio.run(ready())
        yield [process.info for process in processes]
    finally:
        for process in processes:
            process.stop()


def prompt(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(2, 90, 3 + 5 * number).astype(np.int32)


def params(number: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(TOKENS, temperature, (1,), seed=1000 + number)


Use = Callable[[SGLangClient], Awaitable[list[GenerationChunk]]]


def with_client(use: Use) -> list[GenerationChunk]:
    async def run() -> list[GenerationChunk]:
        async with SGLangClient(60) as client:
            return await use(client)

    return asyncio.run(run())


async def ask(
    client: SGLangClient, server: ServerInfo, number: int, temperature: float = 1.0, key: str = ""
) -> GenerationChunk:
    """Ask without what other requests of another `key` left in the server's cache."""
    rid = f"{key}-{number}-{temperature}"
    return await client.generate(
        server, prompt(number), params(number, temperature), rid, key or f"alone-{number}"
    )


@pytest.fixture(scope="module")
def alone(servers) -> list[GenerationChunk]:
    """The answers to requests that a server had one by one."""

    async def one_by_one(client: SGLangClient) -> list[GenerationChunk]:
        return [await ask(client, servers[0], number) for number in range(NUM)]

    return with_client(one_by_one)


def assert_same(answers: list[GenerationChunk], alone: list[GenerationChunk]) -> None:
    for number, (answer, expected) in enumerate(zip(answers, alone, strict=True)):
        np.testing.assert_array_equal(answer.tokens, expected.tokens, f"request {number}")
        assert answer.logprobs.tobytes() == expected.logprobs.tobytes(), f"request {number}"


def test_beside_others(servers, alone) -> None:
    """All start at once, with prompts of all lengths. They end one by one."""

    async def beside(client: SGLangClient) -> list[GenerationChunk]:
        others = (ask(client, servers[0], number, key="others") for number in range(NUM, 3 * NUM))
        own = (ask(client, servers[0], number, key="own") for number in range(NUM))
        return (await asyncio.gather(*own, *others))[:NUM]

    assert_same(with_client(beside), alone)


def test_beside_greedy_ones(servers, alone) -> None:
    async def beside(client: SGLangClient) -> list[GenerationChunk]:
        greedy = (ask(client, servers[0], number, 0.0, "greedy") for number in range(NUM))
        own = (ask(client, servers[0], number, key="mixed") for number in range(NUM))
        return (await asyncio.gather(*own, *greedy))[:NUM]

    assert_same(with_client(beside), alone)


def test_beside_an_evaluation(servers, alone) -> None:
    """Its requests are sampled from a part of the vocabulary, in the same batches."""

    async def beside(client: SGLangClient) -> list[GenerationChunk]:
        async def evaluated(number: int) -> GenerationChunk:
            part = {"top_p": 0.9} if number % 2 else {"top_k": 3}
            own = replace(params(number, 0.6), evaluates=True, **part)
            return await client.generate(servers[0], prompt(number), own, f"e{number}", "e")

        own = (ask(client, servers[0], number, key="trained") for number in range(NUM))
        return (await asyncio.gather(*own, *map(evaluated, range(NUM))))[:NUM]

    assert_same(with_client(beside), alone)


@pytest.mark.slow
@pytest.mark.parametrize("servers", ["history"], indirect=True)
def test_on_another_server(servers, alone) -> None:
    async def there(client: SGLangClient) -> list[GenerationChunk]:
        return await asyncio.gather(*(ask(client, servers[1], number) for number in range(NUM)))

    assert_same(with_client(there), alone)


def test_after_an_interrupt(servers, alone) -> None:
    """Each request ends early on one server, and continues on any."""

    async def interrupted(client: SGLangClient) -> list[GenerationChunk]:
        async def one(number: int) -> GenerationChunk:
            early = replace(params(number), max_new_tokens=7 * number + 1)
            first = await client.generate(servers[0], prompt(number), early, f"a{number}", "a")
            if first.finish_reason == "stop":
                return first
            so_far = np.concatenate([prompt(number), first.tokens])
            left = replace(params(number), max_new_tokens=TOKENS - len(first.tokens))
            rest = await client.generate(
                servers[number % len(servers)], so_far, left, f"b{number}", "b"
            )
            both = Completion([first, rest])
            return replace(rest, tokens=both.tokens, logprobs=both.logprobs)

        return await asyncio.gather(*map(one, range(NUM)))

    assert_same(with_client(interrupted), alone)


@pytest.mark.slow
@pytest.mark.parametrize("servers", ["history"], indirect=True)
def test_what_was_answered_before_takes_few_steps(servers, alone) -> None:
    expected = alone[3]

    async def steps() -> int:
        body = {
            "input_ids": prompt(3).tolist(),
            "sampling_params": {
                "max_new_tokens": TOKENS,
                "stop_token_ids": [1],
                "sampling_seed": params(3).seed,
            },
        }
        async with aiohttp.ClientSession() as session:
            for again in range(3):
                # SGLang may end a request that has the id of the one before it.
                named = body | {"rid": f"again{again}-3-0-0-0"}
                async with session.post(f"{servers[0].url}/generate", json=named) as got:
                    answer = await got.json()
                assert answer["output_ids"] == expected.tokens.tolist()
        return answer["meta_info"]["spec_verify_ct"]

    assert asyncio.run(steps()) < len(expected.tokens) / 3


@pytest.mark.slow  # a server of its own
def test_without_the_setting_a_seed_is_ignored(sglang_server) -> None:
    async def twice(client: SGLangClient) -> list[GenerationChunk]:
        return [await ask(client, sglang_server.info, 5) for _ in range(2)]

    first, second = with_client(twice)
    assert first.tokens.tolist() != second.tokens.tolist()
