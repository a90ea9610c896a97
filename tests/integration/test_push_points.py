"""A push that loses a server, a connection or trainer rank 0, at every point where it can.

The points are not listed here: they are the requests that a clean push makes. The push is the real
one, and so are weight groups. The servers are fake, in processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
import torch
import torch.distributed as dist

from areal_lite.config import TrainConfig
from areal_lite.controller.protocol import PushTargets
from areal_lite.servers import blocking
from areal_lite.servers.client import SGLangClient
from areal_lite.servers.registry import ServerInfo
from areal_lite.weights import broadcast
from areal_lite.weights.push import WeightPusher
from tests.push_server import DIE, DIE_LATER, FAULTS, HANG, LOSE_GROUP, REFUSE, Point, serve
from tests.ranks.processes import processes as forked

TIMEOUT_S, GRACE_S = 4.0, 0.3
LONGEST_PUSH_S = 15.0
TRANSPORTS = ["memory", "disk", "distributed", "adapters"]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def trainer(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(broadcast, "_GRACE_S", GRACE_S)
    monkeypatch.setattr(broadcast, "_EXTRA_CALL_S", 2 * GRACE_S)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@contextmanager
def servers(*faults: tuple[Point, str] | None) -> Iterator[list[ServerInfo]]:
    """Start a server for each fault; None is one without."""
    started, infos = [], []
    try:
        for number, fault in enumerate(faults):
            port, sender = forked.Pipe(duplex=False)
            process = forked.Process(target=serve, args=(sender, fault), daemon=True)
            process.start()
            started.append(process)
            url = f"http://127.0.0.1:{port.recv()}"
            infos.append(
                ServerInfo(name=f"s{number}", url=url, api_key=None, tensor_parallel=1, pid=number)
            )
        yield infos
    finally:
        for process in started:
            process.kill()
            process.join()


@dataclass
class Controller:
    """Names the servers of a push, and remembers how pushes ended."""

    servers: list[ServerInfo]
    pushes: list[tuple[int, list[str]]] = field(default_factory=list)

    def begin_push(self, version: int) -> PushTargets:
        failed = {name for _, names in self.pushes for name in names}
        return PushTargets([server for server in self.servers if server.name not in failed])

    def pushed(self, version: int, failed: list[str]) -> None:
        self.pushes.append((version, failed))


class Weights:
    """Two buckets of a tensor each, which hold their version."""

    version = 0

    def buckets(self, size: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for name in "ab":
            yield [(name, torch.full((3,), float(self.version)))]


@contextmanager
def pusher(
    transport: str, interrupt: str, controller: Controller, folder: Path
) -> Iterator[WeightPusher]:
    config = TrainConfig(model=str(folder))
    (folder / "config.json").write_text("{}")
    config.sync.transport, config.rollout.interrupt = transport, interrupt
    config.sync.timeout_s, config.trainer.lora.rank = TIMEOUT_S, 1
    made = WeightPusher(Weights(), torch.device("cpu"), controller, config, folder)
    try:
        yield made
    finally:
        if group := getattr(made._transport, "_group", None):
            group.break_up()
        made._transport.close([])


def push(one: WeightPusher, version: int, kind: str) -> None:
    one._weights.version = version
    started = time.monotonic()
    (one.push_all if kind == "all" else one.push_stale)(version)
    assert time.monotonic() - started < LONGEST_PUSH_S, "the trainer waited too long"


def state(server: ServerInfo) -> SimpleNamespace:
    with urlopen(f"{server.url}/state", timeout=10) as answer:
        return SimpleNamespace(**json.load(answer))


def check_serving(infos: list[ServerInfo], version: int) -> None:
    """Check that each server generates with one version, and that none ever mixed two."""
    for info in infos:
        found = state(info)
        assert not found.paused and not found.updating, f"{info.name} is left in the push"
        assert found.whole and found.version == str(version), f"{info.name}: {found}"
        assert found.wrong == []


def points(transport: str, interrupt: str, kind: str, folder: Path) -> list[Point]:
    """Return the requests that a server gets in a clean push, which is checked, too."""
    with servers(None, None) as infos:
        controller = Controller(infos)
        with pusher(transport, interrupt, controller, folder) as clean:
            push(clean, 1, kind)
            check_serving(infos, 1)
            assert controller.pushes == [(1, [])]
        calls = state(infos[0]).calls
    return [Point(path, calls[: at + 1].count(path)) for at, path in enumerate(calls)]


LEAVE = "/destroy_weights_update_group"
"""The last request of a push to stale servers. One that refuses it has the weights and is well."""
QUICK = tuple(fault for fault in FAULTS if fault != HANG)  # a hang costs the time-out
WHOLE = [transport for transport in TRANSPORTS if transport != "adapters"]
CASES = [(transport, "in_place", "all", QUICK) for transport in WHOLE]
CASES += [
    ("adapters", "in_place", "all", (DIE,)),
    pytest.param("adapters", "in_place", "all", QUICK, marks=pytest.mark.slow),
]
CASES += [
    pytest.param(transport, interrupt, kind, faults, marks=pytest.mark.slow)
    for transport in TRANSPORTS
    for interrupt, kind, faults in (
        ("in_place", "all", (HANG,)),
        ("retract", "all", FAULTS),
        ("in_place", "stale", FAULTS),
        ("abort", "stale", QUICK),
    )
]


@pytest.mark.parametrize(("transport", "interrupt", "kind", "faults"), CASES)
def test_a_server_is_lost_at_each_point(transport, interrupt, kind, faults, tmp_path) -> None:
    found = points(transport, interrupt, kind, tmp_path)
    assert len(found) >= 2
    for number, (point, fault) in enumerate((p, f) for p in found for f in faults):
        print(f"{fault} at request {point.number} for {point.path}")
        victim = number % 2
        with servers(*((point, fault) if n == victim else None for n in range(2))) as infos:
            harmless = point.path == LEAVE and fault == REFUSE
            good = infos if harmless else [infos[1 - victim]]
            controller = Controller(infos)
            with pusher(transport, interrupt, controller, tmp_path) as one:
                push(one, 1, kind)
                failed = [] if harmless else [infos[victim].name]
                assert controller.pushes == [(1, failed)], "the victim alone failed"
                check_serving(good, 1)
                if fault not in (HANG, DIE, DIE_LATER):
                    assert state(infos[victim]).wrong == [], "the victim mixed two versions"
                push(one, 2, "all")
                check_serving(good, 2)
                assert controller.pushes[1:] == [(2, [])]


def test_servers_have_loaded_adapters_before_they_pause(tmp_path) -> None:
    with servers(None, None) as infos:
        with pusher("adapters", "in_place", Controller(infos), tmp_path) as one:
            push(one, 1, "all")
            check_serving(infos, 1)
        for info in infos:
            found = state(info)
            assert found.loads_at_pause == [True, True], "a load would end within the pause"
            assert found.calls[3:] == [
                "/pause_generation",
                "/begin_weight_update",
                "/update_weights_from_distributed",
                "/end_weight_update",
                "/continue_generation",
            ]


@pytest.mark.parametrize("bucket", [1, 2])
@pytest.mark.parametrize("victims", [1, 2])
def test_the_connections_of_a_weight_group_are_lost(bucket: int, victims: int, tmp_path) -> None:
    """The servers are well, and none is left out: a new group takes the bucket again."""
    fault = (Point("/update_weights_from_distributed", bucket), LOSE_GROUP)
    with servers(fault, fault if victims == 2 else None) as infos:
        controller = Controller(infos)
        with pusher("distributed", "in_place", controller, tmp_path) as one:
            for version in (1, 2):
                push(one, version, "all")
                check_serving(infos, version)
        assert controller.pushes == [(1, []), (2, [])]


class Killed(BaseException):
    """The trainer is dead."""


@contextmanager
def death_at_request(monkeypatch, number: int, delivered: bool) -> Iterator[list[str]]:
    """Let the trainer die with its `number`-th request, which may arrive; yield the requests."""
    seen: list[str] = []
    real = blocking.start_post

    def start_post(server: ServerInfo, path: str, body: dict, timeout_s: float):
        seen.append(path)
        if len(seen) > number or (len(seen) == number and not delivered):
            raise Killed
        call = real(server, path, body, timeout_s)
        if len(seen) == number:
            time.sleep(0.2)  # it has arrived
            raise Killed
        return call

    with monkeypatch.context() as patch:
        patch.setattr(blocking, "start_post", start_post)
        patch.setattr(broadcast, "start_post", start_post)
        yield seen


@pytest.mark.parametrize("delivered", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_0_is_lost_at_each_point(transport, delivered, tmp_path, monkeypatch) -> None:
    """The next trainer finds the servers as the last one left them, and brings them up to date."""

    async def take_over(infos: list[ServerInfo]) -> None:
        async with SGLangClient(10) as client:
            for info in infos:
                await client.reset(info)

    number = 0
    while True:
        number += 1
        with servers(None, None) as infos:
            controller = Controller(infos)
            with death_at_request(monkeypatch, number, delivered) as seen:
                with pusher(transport, "in_place", controller, tmp_path) as dead:
                    try:
                        push(dead, 1, "all")
                        break  # it made fewer requests: every point is done
                    except Killed:
                        pass
            for info in infos:  # the weights may be half new, but then it is paused
                found = state(info)
                assert found.wrong == []
                assert found.paused or found.whole
            asyncio.run(take_over(infos))
            with pusher(transport, "in_place", controller, tmp_path) as successor:
                successor.servers = []
                push(successor, 2, "all")
            for info in infos:
                found = state(info)
                assert not found.paused and not found.updating
                assert found.whole and found.version == "2"
            assert controller.pushes == [(2, [])]
        print(f"killed at request {number}, {seen[-1]}")
    assert number > 4
