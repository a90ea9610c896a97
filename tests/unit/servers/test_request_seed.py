"""Seeds of requests."""

import asyncio
from collections import Counter

import numpy as np

from areal_lite.servers.client import GenerationChunk, SamplingParams, ServerFailed
from areal_lite.servers.fleet import Fleet, Session, request_seed
from areal_lite.servers.registry import ServerInfo


def test_the_seeds_of_a_release_are_those_of_the_next() -> None:
    assert request_seed(1, "0-0-0") == 7501157918620647530
    assert request_seed(1, "12-3-0") == 5747099689641198548
    assert request_seed(2**31, "eval20-7-1-0") == 8784669477125226448


def test_no_two_requests_of_a_run_share_a_seed() -> None:
    seeds = [
        request_seed(run, f"{group}-{sample}-{turn}")
        for run in (1, 2)
        for group in range(10_000)
        for sample in range(8)
        for turn in range(2)
    ]
    assert len(set(seeds)) == len(seeds) == 320_000
    assert 0 <= min(seeds) and max(seeds) < 2**63, "what SGLang takes"
    bits = Counter(bit for seed in seeds[:20_000] for bit in range(63) if seed >> bit & 1)
    assert all(abs(bits[bit] - 10_000) < 400 for bit in range(63))


class Mortal:
    """Servers that abort each request once; the first server dies then."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int | None, int]] = []

    async def weight_version(self, server: ServerInfo) -> int:
        return 0

    async def check_health(self, server: ServerInfo) -> None: ...

    async def generate(self, server, input_ids, params, rid, cache_key) -> GenerationChunk:
        self.sent.append((server.name, params.seed, len(input_ids)))
        if server.name == "a" and len(input_ids) > 2:
            raise ServerFailed(server, "is gone")
        one = np.ones(1, np.int32)
        ended = "length" if params.max_new_tokens == 1 else "abort"
        return GenerationChunk(
            tokens=one, logprobs=one * -1.0, versions=one * 0, finish_reason=ended
        )


def test_a_request_keeps_its_seed_through_aborts_and_on_another_server() -> None:
    async def run(seed: int) -> list[tuple[str, int | None, int]]:
        servers = [
            ServerInfo(name=name, url="http://x", api_key=None, tensor_parallel=1, pid=1)
            for name in "ab"
        ]
        client = Mortal()
        fleet = Fleet(client, lambda: servers, lambda: None, seed=seed)
        watch = asyncio.create_task(fleet.watch())
        while not fleet.router.ready:
            await asyncio.sleep(0)
        await fleet.reserve()
        params = SamplingParams(3, 1.0, (0,))
        await fleet.complete(Session("5-1", servers[0]), np.ones(2, np.int32), params)
        watch.cancel()
        return client.sent

    seed = request_seed(7, "5-1-0")
    assert asyncio.run(run(7)) == [("a", seed, 2), ("a", seed, 3), ("b", seed, 3), ("b", seed, 4)]
    assert asyncio.run(run(8))[0][1] != seed
