"""One completion out of many requests: no token is lost, doubled or made from another prefix."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from areal_lite.routes import ExpertLayout
from areal_lite.servers.client import (
    GenerationChunk,
    SamplingParams,
    ServerFailed,
    ServerRefused,
    SGLangClient,
    _routes,
)
from areal_lite.servers.fleet import Completion, RequestGate
from areal_lite.servers.registry import Router, ServerInfo
from tests.fake_sglang import EOS, EXPERTS, FakeSGLang, completion, logprob, route

PROMPT = np.array([5, 6, 7], np.int32)
SERVER = ServerInfo(name="s", url="u", api_key=None, tensor_parallel=1, pid=1)


def gate_to(client, *servers: ServerInfo) -> RequestGate:
    """An open gate to servers that are ready."""
    router = Router()
    router.update_servers(servers)
    for server in servers:
        router.record_version(server, 0)
    router.pushing = 99
    return RequestGate(client, router, Counter(), "run")


async def finished(
    gate: RequestGate,
    server: ServerInfo,
    prompt: np.ndarray,
    params: SamplingParams,
    rid: str = "r",
    so_far: Completion | None = None,
) -> Completion:
    so_far = so_far or Completion()
    await gate.generate(server, prompt, params, rid, so_far)
    return so_far


@contextlib.asynccontextmanager
async def serving(count: int = 1, **settings):
    """Fake servers, their infos and a client."""
    fakes = [FakeSGLang(**settings) for _ in range(count)]
    client = SGLangClient(timeout_s=5)
    try:
        yield (
            fakes,
            [
                ServerInfo(
                    name=f"s{i}", url=await fake.start(), api_key=None, tensor_parallel=1, pid=i
                )
                for i, fake in enumerate(fakes)
            ],
            client,
        )
    finally:
        await client.close()
        for fake in fakes:
            await fake.stop()


def prompt_of_length(least: int) -> np.ndarray:
    """A prompt whose completion has at least that many tokens."""
    prompts = ([2, i % 90 + 2, i // 90 + 2] for i in range(8000))
    return np.array(next(p for p in prompts if len(completion(p, least)) == least), np.int32)


def params(max_new_tokens: int = 200) -> SamplingParams:
    return SamplingParams(max_new_tokens, 1.0, (EOS,))


def assert_exact(result: Completion, prompt: np.ndarray, max_new_tokens: int = 200) -> None:
    expected = completion(prompt.tolist(), max_new_tokens)
    assert result.tokens.tolist() == expected
    assert result.logprobs.tolist() == pytest.approx(
        [logprob([*prompt.tolist(), *expected[:i]]) for i in range(len(expected))]
    )
    assert result.finish_reason == ("stop" if expected[-1] == EOS else "length")
    assert (result.tokens.dtype, result.logprobs.dtype, result.versions.dtype) == (
        np.int32,
        np.float32,
        np.int32,
    )


async def control(client: SGLangClient, server: ServerInfo, path: str, **body) -> None:
    await client.post(server, path, body)


async def push(client: SGLangClient, server: ServerInfo, mode: str, version: int) -> None:
    await control(client, server, "/pause_generation", mode=mode)
    await control(
        client, server, "/update_weights_from_disk", model_path="m", weight_version=str(version)
    )
    await control(client, server, "/continue_generation")


@pytest.mark.parametrize("budget", [1, 7, 200])
def test_an_undisturbed_request(budget: int) -> None:
    async def run() -> None:
        async with serving() as (fakes, (server,), client):
            result = await finished(gate_to(client, server), server, PROMPT, params(budget))
            assert_exact(result, PROMPT, budget)
            assert result.requests == 1 and set(result.versions) == {0}
            assert fakes[0].requests[0]["sampling_params"]["temperature"] == 1.0

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pushes_in_the_middle_lose_nothing(mode: str) -> None:
    async def run() -> None:
        async with serving(delay_s=0.001) as (fakes, (server,), client):
            prompts = [prompt_of_length(40), *(np.array([9, i], np.int32) for i in range(20))]
            gate = gate_to(client, server)
            runs = [finished(gate, server, p, params(60), f"r{i}") for i, p in enumerate(prompts)]
            tasks = [asyncio.create_task(run) for run in runs]
            for version in range(1, 5):
                await asyncio.sleep(0.008)
                await push(client, server, mode, version)
            results = await asyncio.gather(*tasks)
            for prompt, result in zip(prompts, results):
                assert_exact(result, prompt, 60)
                assert (np.diff(result.versions) >= 0).all()
            assert len(set(results[0].versions)) > 1
            if mode == "abort":
                assert results[0].requests > 1
            else:
                assert all(result.requests == 1 for result in results)

    asyncio.run(run())


def expected_routes(prompt: np.ndarray, result: Completion) -> list:
    """The routes of the forward passes that sampled the tokens of `result`."""
    tokens, first = [*prompt.tolist(), *result.tokens.tolist()], len(prompt)
    versions = [str(result.versions[max(i + 1 - first, 0)]) for i in range(len(tokens) - 1)]
    rows = [route(tokens[: i + 1], version) for i, version in enumerate(versions)]
    return np.sort(np.array(rows), axis=-1).tolist()


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_each_token_was_sampled_with_its_route(mode: str) -> None:
    async def run() -> None:
        async with serving(delay_s=0.001) as (fakes, (server,), client):
            gate, prompt = gate_to(client, server), prompt_of_length(40)
            routed = replace(params(60), experts=EXPERTS)
            task = asyncio.create_task(finished(gate, server, prompt, routed))
            for version in range(1, 4):
                while not (fakes[0].running and len(fakes[0].running[0].tokens) > 2):
                    await asyncio.sleep(0.001)
                await push(client, server, mode, version)
            result = await task
            assert len(set(result.versions)) > 1 and result.routes.dtype == np.uint16
            assert result.routes.tolist() == expected_routes(prompt, result)
            known = [request["routed_experts_start_len"] for request in fakes[0].requests]
            sent = [len(request["input_ids"]) - 1 for request in fakes[0].requests]
            assert known == [0, *sent[1:]], "no route is asked for twice"

    asyncio.run(run())


def test_routes_that_an_abort_did_not_bring_are_asked_for_again() -> None:
    async def run() -> None:
        async with serving() as (fakes, (server,), client):
            prompt = prompt_of_length(20)
            so_far = Completion([aborted(completion(prompt.tolist(), 5))])
            routed = replace(params(20), experts=EXPERTS, first_route=1)
            gate = gate_to(client, server)
            result = await finished(gate, server, prompt, routed, so_far=so_far)
            assert result.routes.tolist() == expected_routes(prompt, result)[1:]

    asyncio.run(run())


def test_dense_layers_have_no_routes() -> None:
    numbers = np.zeros((2, 3, 2), "<i4")  # a server writes something for them
    numbers[:, 1:] = [[[3, 1], [0, 2]], [[2, 3], [1, 0]]]
    layout = ExpertLayout(layers=2, experts=4, top_k=2, dense=1)
    assert _routes(numbers.tobytes(), layout, 2).tolist() == np.sort(numbers[:, 1:]).tolist()
    with pytest.raises(ValueError, match="12 routed_experts, not those of 2 tokens in 2 layers"):
        _routes(numbers.tobytes(), replace(layout, dense=0), 2)


def test_it_continues_on_another_server_from_its_last_known_token() -> None:
    async def run() -> None:
        async with serving(count=2, delay_s=0.002) as (fakes, servers, client):
            prompt, so_far = prompt_of_length(60), Completion()
            gate = gate_to(client, *servers)
            task = asyncio.create_task(finished(gate, servers[0], prompt, params(), so_far=so_far))
            await asyncio.sleep(0.03)
            await push(client, servers[0], "abort", 1)
            await asyncio.sleep(0.01)
            await fakes[0].die()
            with pytest.raises(ServerFailed, match="server s0"):
                await task
            known = len(so_far.tokens)
            assert known > 0
            fakes[1].weight_version = "1"
            result = await finished(gate, servers[1], prompt, params(), so_far=so_far)
            assert_exact(result, prompt)
            assert fakes[1].requests[0]["input_ids"] == [
                *prompt.tolist(),
                *completion(prompt.tolist(), known),
            ]

    asyncio.run(run())


def test_nothing_is_sent_while_the_gate_is_closed() -> None:
    async def run() -> None:
        async with serving() as (fakes, (server,), client):
            gate = gate_to(client, server)
            gate.close()
            task = asyncio.create_task(finished(gate, server, PROMPT, params()))
            await asyncio.sleep(0.02)
            assert not fakes[0].requests
            gate.open()
            gate.close()  # again, before the task had its turn
            await asyncio.sleep(0.02)
            assert not fakes[0].requests
            gate.open()
            assert_exact(await task, PROMPT)

    asyncio.run(run())


class Stub:
    """A client that answers with `chunks`, then raises InterruptedError."""

    def __init__(self, *chunks: GenerationChunk):
        self.chunks = list(chunks)

    async def generate(self, *_: object) -> GenerationChunk:
        if not self.chunks:
            raise InterruptedError
        return self.chunks.pop()


def aborted(tokens: list[int]) -> GenerationChunk:
    return GenerationChunk(
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish_reason="abort",
    )


def test_empty_aborts_do_not_spin() -> None:
    async def run() -> None:
        client = Stub(*[aborted([])] * 5)
        with pytest.raises(ServerFailed, match="nothing has interrupted"):
            await finished(gate_to(client, SERVER), SERVER, PROMPT, params())
        assert len(client.chunks) == 3, "two requests were sent"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tokens", "finish"), [([8, EOS], "stop"), ([8, 8, 8, 8], "length"), ([8, 8], "abort")]
)
@pytest.mark.parametrize("rest", [[], [8], [EOS, 8]])  # of a step with speculation
def test_an_abort_on_the_last_token_is_an_end(tokens, finish: str, rest: list[int]) -> None:
    async def run() -> None:
        so_far, more = Completion(), rest if finish != "abort" else []
        routes = np.arange(2 + len(tokens + more)).reshape(-1, 1, 1)
        gate = gate_to(Stub(replace(aborted(tokens + more), routes=routes)), SERVER)
        with contextlib.suppress(InterruptedError):
            await finished(gate, SERVER, PROMPT, params(4), so_far=so_far)
        assert so_far.finish_reason == finish and so_far.tokens.tolist() == tokens
        assert len(so_far.versions) == len(so_far.logprobs) == len(tokens)
        assert so_far.routes.ravel().tolist() == list(range(2 + len(tokens)))

    asyncio.run(run())


def test_a_request_that_the_server_refuses_is_not_a_server_failure() -> None:
    async def run() -> None:
        async with serving() as (_, (server,), client):
            with pytest.raises(ServerRefused, match="/nowhere answered 404"):
                await client.post(server, "/nowhere", {})

    asyncio.run(run())


@pytest.mark.parametrize("arguments", [(0, 1.0), (4, -0.1)])
def test_bad_sampling_params_are_refused(arguments: tuple[int, float]) -> None:
    with pytest.raises(ValueError):
        SamplingParams(*arguments, ())
