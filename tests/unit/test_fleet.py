"""The servers as one: who may take requests, and that load is given back whatever happens."""

import asyncio

import numpy as np
import pytest

from areal_lite.rollout.fleet import Fleet
from areal_lite.rollout.generate import Piece, SamplingParams, ServerFailed
from areal_lite.rollout.server import ServerInfo

A, B = (ServerInfo(name, f"http://{name}", None, 1, 1) for name in "ab")
PARAMS = SamplingParams(4, 1.0, (1,))
PROMPT = np.array([5], np.int32)


class OneToken:
    """A client whose servers answer with an end token; those in `dead` fail."""

    def __init__(self) -> None:
        self.dead: set[ServerInfo] = set()
        self.versions = {A: 0, B: 0}

    async def request(self, server, input_ids, params, rid, cache_key) -> Piece:
        await asyncio.sleep(0)
        if server in self.dead:
            raise ServerFailed(server, "is dead")
        return Piece(np.array([1], np.int32), np.zeros(1, np.float32), np.array([self.versions[server]], np.int32), "stop")

    async def weight_version(self, server) -> int:
        if server in self.dead:
            raise ServerFailed(server, "is dead")
        return self.versions[server]

    async def abort_all(self, server) -> None:
        raise ServerFailed(server, "is gone")

    async def close(self) -> None: ...


async def looked(fleet: Fleet) -> None:
    """Let it take over what is announced."""
    task = asyncio.create_task(fleet.watch())
    await asyncio.sleep(0.01)
    task.cancel()


def test_a_late_server_waits_for_the_push_that_it_is_part_of() -> None:
    async def run() -> None:
        client, servers = OneToken(), [A]
        fleet = Fleet(client, lambda: servers, lambda: None)
        await looked(fleet)
        pushing_to = list(fleet.router.servers.values())
        servers.append(B)  # joins while the push of version 1 to A alone goes on
        await looked(fleet)
        assert fleet.router.ready == {"a", "b"}
        fleet.resume(1, pushing_to, [])
        assert fleet.router.ready == {"a"}
        fleet.resume(2, [A, B], ["a"])
        assert fleet.router.ready == {"b"} and "did not take version 2" in str(fleet.last_failure)

    asyncio.run(run())


def test_a_server_joins_only_with_the_trainers_version() -> None:
    async def run() -> None:
        client = OneToken()
        client.versions[B] = 3
        fleet = Fleet(client, lambda: [A, B], lambda: None)
        await looked(fleet)
        assert fleet.router.ready == {"a"} and set(fleet.router.servers) == {"a", "b"}

    asyncio.run(run())


def test_completions_move_on_and_give_their_places_back() -> None:
    async def run() -> None:
        client = OneToken()
        fleet = Fleet(client, lambda: [A, B], lambda: None)
        await looked(fleet)
        client.dead.add(A)
        server = await fleet.reserve(3)
        assert server == A and (await fleet.reserve(1)) == B
        results = await asyncio.gather(*(fleet.complete(PROMPT, PARAMS, str(i), server) for i in range(3)))
        assert [r.requests for r in results] == [2, 2, 2] and fleet.counts["retries"] == 3
        assert fleet.router.load["a"] == 0 and fleet.router.load["b"] == 1 and fleet.in_flight == 0
        await fleet.abort_all()  # servers that are gone are no error

    asyncio.run(run())


def test_without_a_server_it_waits_for_one() -> None:
    async def run() -> None:
        servers: list[ServerInfo] = []
        changes = []
        fleet = Fleet(OneToken(), lambda: servers, lambda: changes.append(1))
        waiting = asyncio.create_task(fleet.reserve(1))
        await looked(fleet)
        assert not waiting.done() and not fleet.router.all_failed
        servers.append(A)
        await looked(fleet)
        assert await asyncio.wait_for(waiting, 1) == A and changes

    asyncio.run(run())


def test_drain_waits_for_what_is_in_flight() -> None:
    async def run() -> None:
        fleet = Fleet(OneToken(), lambda: [A], lambda: None)
        await looked(fleet)
        tasks = [asyncio.create_task(fleet.complete(PROMPT, PARAMS, str(i), await fleet.reserve(1))) for i in range(2)]
        await asyncio.sleep(0)
        fleet.hold()
        assert await fleet.drain() == 2 and fleet.in_flight == 0
        held = asyncio.create_task(fleet.complete(PROMPT, PARAMS, "2", await fleet.reserve(1)))
        await asyncio.sleep(0.01)
        assert fleet.in_flight == 0 and not held.done()
        fleet.resume(1, [A], [])
        await asyncio.gather(held, *tasks)

    asyncio.run(run())


def test_an_unexpected_error_while_aborting_is_not_swallowed() -> None:
    async def run() -> None:
        client = OneToken()
        fleet = Fleet(client, lambda: [A], lambda: None)
        await looked(fleet)

        async def broken(server):
            raise KeyError("bug")

        client.abort_all = broken
        with pytest.raises(KeyError):
            await fleet.abort_all()

    asyncio.run(run())
