"""The fleet: which servers may take requests, and that every reservation is given back."""

import asyncio
import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest

from areal_lite.servers.client import (
    GenerationChunk,
    SamplingParams,
    ServerError,
    ServerFailed,
    ServerUnreachable,
)
from areal_lite.servers.fleet import Fleet, Session
from areal_lite.servers.registry import ServerInfo

A, B, C = (
    ServerInfo(name=name, url=f"http://{name}", api_key=None, tensor_parallel=1, pid=1)
    for name in "abc"
)
PARAMS = SamplingParams(4, 1.0, (1,))
PROMPT = np.array([5], np.int32)


class OneToken:
    """A client whose servers answer with an end token.

    Servers in `dead` fail. Requests to servers in `hung` and `slow` do not end; the `slow` ones
    are healthy.
    """

    def __init__(self) -> None:
        self.dead: set[ServerInfo] = set()
        self.hung: set[ServerInfo] = set()
        self.slow: set[ServerInfo] = set()
        self.versions = {A: 0, B: 0, C: 0}
        self.checks = 0
        self.cache_keys: list[str] = []
        self.rids: list[str] = []
        self.resets: list[ServerInfo] = []
        self.silence: asyncio.Event | None = None
        self.after_silence: ServerError = ServerUnreachable(A, "does not answer in time")

    async def generate(self, server, input_ids, params, rid, cache_key) -> GenerationChunk:
        await asyncio.sleep(0)
        self.cache_keys.append(cache_key)
        self.rids.append(rid)
        while server in self.hung | self.slow:
            await asyncio.sleep(0.001)
        if server in self.dead:
            raise ServerFailed(server, "is dead")
        return GenerationChunk(
            tokens=np.array([1], np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=np.array([self.versions[server]], np.int32),
            finish_reason="stop",
        )

    async def weight_version(self, server) -> int:
        if server in self.dead:
            raise ServerFailed(server, "is dead")
        return self.versions[server]

    async def check_health(self, server) -> None:
        self.checks += 1
        if self.silence:
            await self.silence.wait()
            raise self.after_silence
        if server in self.dead | self.hung:
            raise ServerUnreachable(server, "does not answer")

    async def abort_all(self, server) -> None:
        raise ServerFailed(server, "is gone")

    async def reset(self, server) -> None:
        self.resets.append(server)
        if server in self.dead:
            raise ServerFailed(server, "is dead")

    async def close(self) -> None: ...


async def watched_once(fleet: Fleet) -> None:
    """Let the fleet take over the announced servers."""
    task = asyncio.create_task(fleet.watch())
    await asyncio.sleep(0.01)
    task.cancel()


def test_a_late_server_waits_for_the_push_that_it_is_part_of() -> None:
    async def run() -> None:
        client, servers = OneToken(), [A]
        fleet = Fleet(client, lambda: servers, lambda: None)
        await watched_once(fleet)
        fleet.begin_push(1, list(fleet.router.servers.values()))
        servers.append(B)  # joins while the push of version 1 to A alone goes on
        await watched_once(fleet)
        assert fleet.router.ready == {"a", "b"}
        fleet.finish_push(1, [])
        assert fleet.router.ready == {"a"} and fleet.router.stale == [B]
        fleet.begin_push(1, [B])  # version 1 again
        fleet.finish_push(1, [])
        assert fleet.router.ready == {"a", "b"}
        fleet.begin_push(2, [A, B])
        fleet.finish_push(2, ["a"])
        assert fleet.router.ready == {"b"} and "did not take version 2" in str(
            fleet.gate.last_failure
        )

    asyncio.run(run())


def test_a_server_joins_only_with_the_trainers_version() -> None:
    async def run() -> None:
        client = OneToken()
        client.versions[B] = 3
        fleet = Fleet(client, lambda: [A, B], lambda: None)
        await watched_once(fleet)
        assert fleet.router.ready == {"a"} and set(fleet.router.servers) == {"a", "b"}

    asyncio.run(run())


def test_requests_share_prefixes_within_a_version_only() -> None:
    async def run() -> None:
        client = OneToken()
        fleet = Fleet(client, lambda: [A], lambda: None)
        await watched_once(fleet)
        await fleet.complete(await fleet.open_session("0"), PROMPT, PARAMS)
        fleet.begin_push(1, [A])
        client.versions[A] = 1
        fleet.finish_push(1, [])
        await fleet.complete(await fleet.open_session("1"), PROMPT, PARAMS)
        again = Fleet(client, lambda: [A], lambda: None)
        again.router.version = 1
        await watched_once(again)
        await again.complete(Session("2", await again.reserve()), PROMPT, PARAMS)
        assert len(set(client.cache_keys)) == 3, "another controller may have other weights"

    asyncio.run(run())


def test_a_request_in_a_queue_during_a_push_may_use_what_older_weights_cached() -> None:
    async def run() -> None:
        client = OneToken()
        fleet = Fleet(client, lambda: [A], lambda: None)
        await watched_once(fleet)
        client.slow.add(A)
        queued = asyncio.create_task(fleet.complete(await fleet.open_session("0"), PROMPT, PARAMS))
        await asyncio.sleep(0.01)
        fleet.begin_push(1, [A])
        client.versions[A] = 1
        client.slow.clear()  # the server turns to it under the new weights
        fleet.finish_push(1, [])
        (chunk,) = (await queued).chunks
        assert (chunk.versions.tolist(), chunk.kv_version) == ([1], 0)
        (chunk,) = (await fleet.complete(await fleet.open_session("1"), PROMPT, PARAMS)).chunks
        assert (chunk.versions.tolist(), chunk.kv_version) == ([1], 1)

    asyncio.run(run())


def test_completions_move_on_and_give_their_reservations_back() -> None:
    async def run() -> None:
        client = OneToken()
        fleet = Fleet(client, lambda: [A, B], lambda: None)
        await watched_once(fleet)
        client.dead.add(A)
        server = A
        assert await fleet.place(2) + [await fleet.reserve([A])] == [A, A, A]
        assert await fleet.reserve() == B
        results = await asyncio.gather(
            *(fleet.complete(Session(str(i), server), PROMPT, PARAMS) for i in range(3))
        )
        assert [r.requests for r in results] == [2, 2, 2] and fleet.counts["retries"] == 3
        assert (
            fleet.router.load["a"] == 0
            and fleet.router.load["b"] == 1
            and fleet.gate.in_flight == 0
        )
        await fleet.abort_all()  # servers that are gone are no error

    asyncio.run(run())


def test_without_a_server_it_waits_for_one() -> None:
    async def run() -> None:
        servers: list[ServerInfo] = []
        changes = []
        fleet = Fleet(OneToken(), lambda: servers, lambda: changes.append(1))
        waiting = asyncio.create_task(fleet.reserve())
        await watched_once(fleet)
        assert not waiting.done()
        servers.append(A)
        await watched_once(fleet)
        assert await asyncio.wait_for(waiting, 1) == A and changes

    asyncio.run(run())


def test_turns_of_an_episode_that_wait_together_are_requests_of_their_own() -> None:
    """A server refuses a second request with the same id, and would look broken."""

    async def run() -> None:
        client, servers = OneToken(), [A]
        fleet = Fleet(client, lambda: servers, lambda: None)
        await watched_once(fleet)
        session = await fleet.open_session("0")
        await fleet.complete(session, PROMPT, PARAMS)
        servers.clear()
        await watched_once(fleet)
        turns = [asyncio.create_task(fleet.complete(session, PROMPT, PARAMS)) for _ in "ab"]
        await asyncio.sleep(0.01)
        servers.append(B)
        await watched_once(fleet)
        await asyncio.gather(*turns)
        assert len(client.rids) == len(set(client.rids)) == 3
        assert not fleet.router.load.total() and session.turns == 3

    asyncio.run(run())


def test_no_ready_server_while_something_waits() -> None:
    async def run() -> None:
        client, servers = OneToken(), [A]
        fleet = Fleet(client, lambda: servers, lambda: None)
        await watched_once(fleet)
        server = await fleet.reserve()
        client.dead.add(A)
        assert not fleet.no_ready_server
        moving = asyncio.create_task(fleet.complete(Session("0", server), PROMPT, PARAMS))
        await until(lambda: fleet.no_ready_server)
        client.versions[B] = 3
        servers.append(B)  # has other weights than the trainer
        await watched_once(fleet)
        assert fleet.no_ready_server
        client.dead.clear()
        servers.append(C)
        await watched_once(fleet)
        await moving
        assert not fleet.no_ready_server
        fleet.begin_push(1, [C])
        fleet.finish_push(1, ["c"])
        assert not fleet.no_ready_server, "nothing waits"
        waiting = asyncio.create_task(fleet.reserve())
        await until(lambda: fleet.no_ready_server)
        waiting.cancel()
        await until(lambda: not fleet.no_ready_server)

    asyncio.run(run())


def test_drain_waits_for_what_is_in_flight() -> None:
    async def run() -> None:
        client = OneToken()
        fleet = Fleet(client, lambda: [A], lambda: None)
        await watched_once(fleet)
        tasks = [
            asyncio.create_task(fleet.complete(await fleet.open_session(str(i)), PROMPT, PARAMS))
            for i in range(2)
        ]
        await asyncio.sleep(0)
        fleet.gate.close()
        assert await fleet.gate.drain() == 2 and fleet.gate.in_flight == 0
        held = asyncio.create_task(fleet.complete(await fleet.open_session("2"), PROMPT, PARAMS))
        await asyncio.sleep(0.01)
        assert fleet.gate.in_flight == 0 and not held.done()
        fleet.begin_push(1, [A])
        client.versions[A] = 1
        fleet.finish_push(1, [])
        await asyncio.gather(held, *tasks)

    asyncio.run(run())


def test_an_unexpected_error_while_aborting_is_not_swallowed() -> None:
    async def run() -> None:
        client = OneToken()
        fleet = Fleet(client, lambda: [A], lambda: None)
        await watched_once(fleet)

        async def broken(server):
            raise KeyError("bug")

        client.abort_all = broken
        with pytest.raises(KeyError):
            await fleet.abort_all()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def watched(client: OneToken, servers: list[ServerInfo], unhealthy: list[ServerInfo]):
    """A fleet that checks `servers` every millisecond."""
    fleet = Fleet(
        client,
        lambda: servers,
        lambda: None,
        lambda server, reason: unhealthy.append(server),
        health_interval_s=0.001,
    )
    task = asyncio.create_task(fleet.watch())
    await asyncio.sleep(0.01)
    try:
        yield fleet
    finally:
        task.cancel()


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def test_requests_on_a_hung_server_move_and_it_is_marked_unhealthy() -> None:
    async def run() -> None:
        client, unhealthy = OneToken(), []
        async with watched(client, [A, B], unhealthy) as fleet:
            client.hung.add(A)
            servers = [await fleet.reserve() for _ in range(4)]
            results = await asyncio.gather(
                *(
                    fleet.complete(Session(str(i), server), PROMPT, PARAMS)
                    for i, server in enumerate(servers)
                )
            )
            assert [len(r.tokens) for r in results] == [1] * 4 and fleet.counts["retries"] == 2
            assert unhealthy == [A] and fleet.router.ready == {"b"} and not fleet.router.load["a"]

    asyncio.run(run())


def test_an_idle_server_that_dies_is_found_too() -> None:
    async def run() -> None:
        client, unhealthy = OneToken(), []
        async with watched(client, [A, B], unhealthy) as fleet:
            client.dead.add(B)
            await until(lambda: unhealthy)
            assert unhealthy == [B] and fleet.router.ready == {"a"}

    asyncio.run(run())


def test_a_server_that_takes_weights_is_not_judged_by_its_silence() -> None:
    async def run() -> None:
        client, unhealthy = OneToken(), []
        async with watched(client, [A, B], unhealthy) as fleet:
            fleet.begin_push(1, [A])
            client.hung.add(A)
            before = client.checks
            await until(lambda: client.checks > before + 3)  # B's go on
            client.hung.clear()
            fleet.finish_push(1, [])
            assert not unhealthy and fleet.router.ready == {"a"} and fleet.router.stale == [B]

    asyncio.run(run())


@pytest.mark.parametrize("wrong", [False, True])
def test_no_answer_to_a_question_that_a_push_overtook_counts_for_nothing(wrong: bool) -> None:
    """A wrong answer counts at any time."""

    async def run() -> None:
        client, unhealthy = OneToken(), []
        if wrong:
            client.after_silence = ServerFailed(A, "gave a wrong answer")
        async with watched(client, [A], unhealthy) as fleet:
            client.silence = asyncio.Event()
            before = client.checks
            await until(lambda: client.checks > before)
            fleet.begin_push(1, [A])
            fleet.finish_push(1, [])
            client.silence.set()  # no answer in time
            client.silence = None
            if wrong:
                await until(lambda: unhealthy)
                return
            before = client.checks
            await until(lambda: client.checks > before)
            assert not unhealthy

    asyncio.run(run())


def test_a_withdrawn_server_finishes_its_requests_and_is_monitored_until_then() -> None:
    async def run() -> None:
        client, unhealthy, servers = OneToken(), [], [A, B]
        async with watched(client, servers, unhealthy) as fleet:
            server = await fleet.reserve()
            client.slow.add(A)
            task = asyncio.create_task(fleet.complete(Session("0", server), PROMPT, PARAMS))
            await asyncio.sleep(0.005)
            servers.remove(A)
            fleet.router.update_servers(servers)
            await asyncio.sleep(0.02)
            assert not task.done() and not unhealthy and await fleet.reserve() == B
            client.hung.add(A)
            assert len((await task).tokens) == 1 and unhealthy == [A]

    asyncio.run(run())


def test_the_samples_of_a_group_move_to_one_server() -> None:
    async def run() -> None:
        client, unhealthy = OneToken(), []
        async with watched(client, [A, B, C], unhealthy) as fleet:
            assert await fleet.place(2) == [A, A]
            group, holders = B, [B]
            assert await fleet.place(2) + [await fleet.reserve([B]) for _ in "ab"] == [B] * 4
            client.dead.add(B)
            client.slow.add(C)  # keeps them there long enough to look
            sessions = [Session(str(i), group, holders=holders) for i in range(4)]
            tasks = [asyncio.create_task(fleet.complete(s, PROMPT, PARAMS)) for s in sessions]
            await until(lambda: fleet.gate.in_flight_on(C) == 4)
            client.slow.clear()
            await asyncio.gather(*tasks)
            assert fleet.router.load == {"a": 2, "b": 0, "c": 0}

    asyncio.run(run())


def test_a_request_does_not_go_to_a_server_that_became_stale_while_it_waited() -> None:
    async def run() -> None:
        client, unhealthy = OneToken(), []
        async with watched(client, [A, B], unhealthy) as fleet:
            fleet.gate.close()
            held = asyncio.create_task(
                fleet.complete(await fleet.open_session("0"), PROMPT, PARAMS)
            )
            await asyncio.sleep(0.005)
            client.versions[B] = 1
            fleet.begin_push(1, [B])
            fleet.finish_push(1, [])
            assert (
                (await held).versions.tolist() == [1]
                and unhealthy == []
                and fleet.counts["requests"] == 1
            )

    asyncio.run(run())


def test_servers_of_an_earlier_controller_get_no_request_before_a_push() -> None:
    """They may say the trainer's version and have other weights, and may be in a push."""

    async def run() -> None:
        client, servers, marked = OneToken(), [A, B], []
        client.dead.add(B)
        fleet = Fleet(client, lambda: servers, lambda: None, lambda s, reason: marked.append(s))
        await fleet.take_over()
        assert client.resets == [A, B] and marked == [B]
        servers.append(C)  # starts now
        await watched_once(fleet)
        assert fleet.router.ready == {"c"} and fleet.router.stale == [A]
        assert set(fleet.router.servers) == {"a", "c"}
        fleet.begin_push(0, [A])
        fleet.finish_push(0, [])
        assert fleet.router.ready == {"a", "c"}

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_groups_stay_together_and_leave_no_server_idle(seed: int) -> None:
    async def run() -> None:
        draw, client = random.Random(seed), OneToken()
        servers = [replace(A, name=f"s{number}") for number in range(draw.randint(1, 8))]
        client.versions = dict.fromkeys(servers, 0)
        async with watched(client, servers, []) as fleet:
            load, held = fleet.router.load, []
            for _ in range(100):
                size, least = draw.randint(1, 8), min(load[server.name] for server in servers)
                placed = await fleet.place(size)
                held += placed
                assert load.total() == len(held) and len(placed) == size
                if least >= size - 2:
                    assert len(set(placed)) == 1, "a group is divided that need not be"
                least = min(load[server.name] for server in servers)
                most = max(load[server.name] for server in placed)
                assert most <= 2 * (least + 1), "a server has little beside a whole group"
                draw.shuffle(held)
                for _ in range(draw.randint(0, len(held))):
                    fleet.release(held.pop())

    asyncio.run(run())
