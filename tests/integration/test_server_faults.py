"""Servers that die, hang or fail during a push: nothing is lost, and no version is wrong."""

import asyncio
import json
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch

from areal_lite.config import ServerConfig, load_config
from areal_lite.launch.roles import RoleFailed
from areal_lite.launch.server_pool import LOG, ServerPool, ServerProcess, supervise_until_end
from areal_lite.run_dir.paths import TOTALS_FILE
from areal_lite.servers.blocking import post
from areal_lite.servers.registry import (
    ServerInfo,
    announce_server,
    announced_servers,
    drain_server,
    mark_unhealthy,
)
from areal_lite.system.network import free_port
from areal_lite.weights.push import WeightPusher
from tests.integration.controller_run import GROUPS, assert_exact, assert_store_matches, push

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(120)


def fake_pool(
    folder: Path, *names: str, max_restarts: int = 3, delay: float = 0.005, code: str | None = None
) -> ServerPool:
    """Supervised fake servers. `code` runs instead of them."""
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")  # the only file of a model that is needed

    def make(name: str) -> ServerProcess:
        config, port = ServerConfig(device="cpu", start_timeout_s=20), free_port()
        server = ServerProcess(
            config,
            str(folder),
            name=name,
            port=port,
            seed=1,
            log_path=folder / "logs" / f"{name}.log",
        )
        server.argv = [
            sys.executable,
            "tests/fake_sglang.py",
            str(folder),
            name,
            "--port",
            str(port),
            "--delay",
            str(delay),
        ]
        server.argv = [sys.executable, "-c", code] if code else server.argv
        server.environment = {**server.environment, "PYTHONPATH": str(ROOT)}
        return server

    return ServerPool(folder, {name: lambda name=name: make(name) for name in names}, max_restarts)


def until(condition, seconds: float = 30):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return result


def server(folder: Path, name: str) -> ServerInfo | None:
    return next((s for s in announced_servers(folder) if s.name == name), None)


def log_of(folder: Path) -> str:
    return (folder / "logs" / LOG).read_text()


def test_a_server_that_dies_is_started_again_until_its_budget_is_spent(tmp_path) -> None:
    with fake_pool(tmp_path, "a", max_restarts=1) as pool:
        pool.wait_ready()
        first = server(tmp_path, "a")
        os.kill(first.pid, signal.SIGKILL)
        second = until(lambda: (s := server(tmp_path, "a")) and s != first and s)
        assert second.url != first.url
        os.kill(second.pid, signal.SIGKILL)
        until(lambda: "given up" in log_of(tmp_path))
        until(pool._ended.done)
        with pytest.raises(RoleFailed, match="no server is left"):
            pool.check()
    assert "restart 1 of 1" in log_of(tmp_path) and "status -9" in log_of(tmp_path)
    assert announced_servers(tmp_path) == []


def test_an_unhealthy_server_is_replaced_and_the_others_stay(tmp_path) -> None:
    with fake_pool(tmp_path, "a", "b") as pool:
        pool.wait_ready()
        a, b = announced_servers(tmp_path)
        os.kill(a.pid, signal.SIGSTOP)
        mark_unhealthy(tmp_path, a, "it hangs")
        until(lambda: (s := server(tmp_path, "a")) and s.pid != a.pid)
        assert server(tmp_path, "b") == b and not os.path.exists(f"/proc/{a.pid}")
        pool.check()
    assert re.search(r"a is started again in 0 s \(restart 1 of 3\): it hangs", log_of(tmp_path))
    assert not os.path.exists(f"/proc/{b.pid}")


def test_a_server_whose_announcement_is_removed_announces_itself_again(tmp_path) -> None:
    with fake_pool(tmp_path, "a") as pool:
        pool.wait_ready()
        first = server(tmp_path, "a")
        (tmp_path / "servers" / "a.json").unlink()
        assert until(lambda: server(tmp_path, "a")) == first
        pool.check()
    assert "a is announced again" in log_of(tmp_path) and announced_servers(tmp_path) == []


def test_a_drained_server_finishes_its_requests_and_is_not_started_again(run) -> None:
    r = run(max_staleness=0, sync__timeout_s=20.0)
    with fake_pool(r.path, "s0", "s1", delay=0.1) as pool:
        pool.wait_ready()
        client = r.start_controller()
        drained = until(lambda: busy_server(r.path))
        drain_server(r.path, drained.name)
        until(lambda: f"{drained.name} was drained and has ended" in log_of(r.path))
        assert not os.path.exists(f"/proc/{drained.pid}")
        (other,) = announced_servers(r.path)
        used = {0: groups(client.batch(0, 0, 1)[0])}
        assert push(client, 1, "in_place").servers == [other]
        batch, _ = client.batch(1, 0, 1)
        assert_exact(batch)
        used[1] = groups(batch)
        push(client, 2, "in_place")
        totals = client.finish()
        assert [path.name for path in (r.path / "servers").iterdir()] == [f"{other.name}.json"]
    assert totals["retries"] == 0, "a request had to move"
    assert_store_matches(r, totals, used)
    assert "started again" not in log_of(r.path)


def test_a_hung_server_is_drained_without_its_requests(run) -> None:
    r = run(max_staleness=0, **SETTINGS)
    with fake_pool(r.path, "s0", "s1", delay=0.1) as pool:
        pool.wait_ready()
        client = r.start_controller()
        hung = until(lambda: busy_server(r.path))
        os.kill(hung.pid, signal.SIGSTOP)
        drain_server(r.path, hung.name)
        batch, _ = client.batch(0, 0, 1)
        assert_exact(batch)
        until(lambda: f"{hung.name} was drained and has ended" in log_of(r.path))
        assert not os.path.exists(f"/proc/{hung.pid}")
        pool.check()


def busy_server(folder: Path) -> ServerInfo | None:
    """Return a fake server that runs a request."""

    def running(info: ServerInfo) -> int:
        return json.loads(urlopen(f"{info.url}/model_info").read())["running"]

    return next(filter(running, announced_servers(folder)), None)


def test_a_pool_goes_on_while_others_have_servers(tmp_path) -> None:
    with fake_pool(tmp_path, "a", max_restarts=0) as pool:
        pool.wait_ready()
        first = server(tmp_path, "a")
        announce_server(tmp_path, replace(first, name="elsewhere"))
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: "a is given up" in log_of(tmp_path))
        time.sleep(0.2)
        pool.check()


def test_a_pool_of_drained_servers_ends_well(tmp_path) -> None:
    pool = fake_pool(tmp_path, "a", "b")

    async def test() -> None:
        servers = asyncio.create_task(supervise_until_end(pool, tmp_path))
        for name in "ab":
            while not server(tmp_path, name):
                await asyncio.sleep(0.05)
            drain_server(tmp_path, name)
        await asyncio.wait_for(servers, 20)

    asyncio.run(test())
    assert list((tmp_path / "servers").iterdir()) == []


def test_servers_end_with_the_run_and_not_before(tmp_path) -> None:
    pool = fake_pool(tmp_path, "a")

    async def test() -> None:
        servers = asyncio.create_task(supervise_until_end(pool, tmp_path))
        while not announced_servers(tmp_path):
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)
        assert not servers.done()
        (tmp_path / TOTALS_FILE).write_text("{}")
        await asyncio.wait_for(servers, 20)

    asyncio.run(test())
    assert announced_servers(tmp_path) == []


def test_a_server_that_never_comes_up_ends_the_pool_at_once(tmp_path) -> None:
    with (
        fake_pool(tmp_path, "a", code="print('no such flag'); raise SystemExit(2)") as pool,
        pytest.raises(RuntimeError, match="no such flag"),
    ):
        pool.wait_ready()


SETTINGS = {"sync__timeout_s": 2.0}


def test_servers_that_die_or_hang_come_back_at_the_trainers_version(run) -> None:
    """One is killed and one is stopped, both with requests: a push of the same version helps."""
    r = run(max_staleness=0, **SETTINGS)
    with fake_pool(r.path, "s0", "s1", delay=0.02) as pool:
        pool.wait_ready()
        client = r.start_controller()
        used, caught_up = {0: groups(client.batch(0, 0, 1)[0])}, []
        push(client, 1, "in_place")
        until(lambda: r.store().counts()["in_flight"] == GROUPS)
        killed, stopped = announced_servers(r.path)
        os.kill(killed.pid, signal.SIGKILL)
        os.kill(stopped.pid, signal.SIGSTOP)
        batch, _ = client.batch(
            1,
            0,
            1,
            lambda: caught_up.append([s.name for s in push(client, 1, "in_place").servers]),
        )
        assert_exact(batch)
        assert set(batch.versions[batch.loss_mask]) == {1}, "they came back with version 0"
        assert caught_up[0] in (["s0"], ["s1"], ["s0", "s1"])
        used[1] = groups(batch)
        until(
            lambda: (
                {s.name for s in announced_servers(r.path) if s not in (killed, stopped)}
                == {"s0", "s1"}
            )
        )
        until(lambda: r.log().count("has version 0, not 1") == 2)
        assert push(client, 2, "in_place").servers == announced_servers(r.path)
        batch, _ = client.batch(2, 0, 1)
        assert_exact(batch)
        used[2] = groups(batch)
        push(client, 3, "in_place")
        totals = client.finish()
    assert totals["retries"] > 0
    assert_store_matches(r, totals, used)
    assert "status -9" in log_of(r.path) and "no answer to /server_info within 1 s" in log_of(
        r.path
    )


def test_a_late_server_catches_up_while_the_trainer_waits(run) -> None:
    r = run(max_staleness=0)
    with fake_pool(r.path, "s0", delay=0.1) as pool:
        pool.wait_ready()
        client = r.start_controller()
        client.batch(0, 0, 1)
        push(client, 1, "in_place")
        r.start_server("late", delay=0)
        asked: list[list[str]] = []
        client.batch(
            1, 0, 1, lambda: asked.append([s.name for s in push(client, 1, "in_place").servers])
        )
        assert asked == [["late"]], "the one that has the version goes on"


def kill_soon(victims: list[ServerInfo]) -> None:
    """Kill servers while they have requests. Pause them first, with `post`."""
    threading.Timer(
        0.5, lambda: [os.kill(victim.pid, signal.SIGKILL) for victim in victims]
    ).start()


def test_an_evaluation_after_the_last_step_that_lost_its_servers_ends_at_once(run) -> None:
    """No server comes back. One is enough to go on."""
    r = run(trainer__steps=1, restart__max=0, **SETTINGS)
    with fake_pool(r.path, "s0", "s1", max_restarts=0) as pool:
        pool.wait_ready()
        client = r.start_controller()
        used = {0: groups(client.batch(0, 0, 1)[0])}
        push(client, 1, "in_place")
        s0, s1 = announced_servers(r.path)
        post(s0, "/pause_generation", {"mode": "in_place"}, 10)
        kill_soon([s0])
        assert client.evaluate(1)["versions"] == [1]
        post(s1, "/pause_generation", {"mode": "in_place"}, 10)
        kill_soon([s1])
        started = time.monotonic()
        with pytest.raises(
            RuntimeError,
            match=r"evaluation at version 1 is lost: no server .*\(server s.*"
            r"Training is complete.*checkpoints/hf",
        ):
            client.evaluate(1)
        assert time.monotonic() - started < 8
        totals = client.finish()
    assert r.processes["controller"].wait(10) == 0, r.log()
    assert_store_matches(r, totals, used)


def test_a_server_that_comes_back_during_the_last_evaluation_gets_the_last_weights(run) -> None:
    """Two ranks wait for its end: both take part in the push."""
    r = run(trainer__steps=1, **SETTINGS)
    with fake_pool(r.path, "s0") as pool:
        pool.wait_ready()
        client, evaluator, other = r.start_controller(), r.client(), r.client()
        used = {0: groups(client.batch(0, 0, 1)[0])}
        push(client, 1, "in_place")
        (s0,) = announced_servers(r.path)
        post(s0, "/pause_generation", {"mode": "in_place"}, 10)
        kill_soon([s0])
        pushed: list[str] = []
        with ThreadPoolExecutor(2) as thread:
            evaluation = thread.submit(evaluator.evaluate, 1)
            rank_1 = thread.submit(other.await_evaluation, 1, lambda: pushed.append("rank 1"))
            client.await_evaluation(
                1, lambda: pushed.extend(s.name for s in push(client, 1, "in_place").servers)
            )
            rank_1.result(10)
            assert evaluation.result(1)["versions"] == [1]
        assert sorted(pushed) == ["rank 1", "s0"]
        totals = client.finish()
    assert r.processes["controller"].wait(10) == 0, r.log()
    assert_store_matches(r, totals, used)


def test_an_evaluation_during_training_waits_until_a_server_has_caught_up(run) -> None:
    r = run(max_staleness=0, trainer__steps=2, **SETTINGS)
    with fake_pool(r.path, "s0") as pool:
        pool.wait_ready()
        client, other = r.start_controller(), r.client()
        client.batch(0, 0, 1)
        push(client, 1, "in_place")
        (s0,) = announced_servers(r.path)
        post(s0, "/pause_generation", {"mode": "in_place"}, 10)
        kill_soon([s0])
        with ThreadPoolExecutor(1) as thread:
            evaluation = thread.submit(other.evaluate, 1)
            until(lambda: "has version 0, not 1" in r.log())
            assert not evaluation.done()
            client.batch(1, 0, 1, lambda: push(client, 1, "in_place"))
            assert evaluation.result(20)["versions"] == [1]


def groups(batch) -> list[int]:
    return sorted(set(batch.group_ids.tolist()))


class Weights:
    """The weights of a trainer, as a pusher sees them."""

    def buckets(self, bucket_bytes: int):
        yield [("a", torch.arange(6.0))]
        yield [("b", torch.ones(3, dtype=torch.bfloat16))]


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
)
def test_a_server_that_dies_during_a_push_is_left_out_and_the_push_goes_on(run, path: str) -> None:
    # Nobody hangs here, and a busy machine may be silent for a second.
    r = run(max_staleness=0, sync__transport="disk", sync__timeout_s=20.0)
    Path(r.path, "config.json").write_text("{}")
    r.start_server("good")
    r.start("bad", "tests/fake_sglang.py", str(r.path), "bad", "--die-at", path)
    until(lambda: len(announced_servers(r.path)) == 2)
    client = r.start_controller()
    config = load_config(r.path)
    config.model = str(r.path)
    pusher = WeightPusher(Weights(), torch.device("cpu"), client, config, r.path)
    client.batch(0, 0, 1)
    assert pusher.push_all(1).failed == ["bad"]
    batch, _ = client.batch(1, 0, 1, lambda: pusher.push_stale(1))
    assert_exact(batch)
    assert set(batch.versions[batch.loss_mask]) == {1}
    assert (r.path / "servers" / "bad.unhealthy").exists()
    # It comes back, and takes the next version with the other.
    r.start_server("bad")
    until(lambda: "server bad (http" in r.log() and "has version 0, not 1" in r.log())
    assert pusher.push_all(2).failed == [] and len(pusher.servers) == 2
    r.processes["good"].kill()
    r.processes["bad"].kill()
    # A push to no server is not an error: a server that comes back is resynced. A server whose
    # request breaks before the push begins is not asked at all.
    assert set(pusher.push_all(3).failed) <= {"bad", "good"} and pusher.servers == []
    r.start_server("good")
    batch, _ = client.batch(3, 0, 1, lambda: pusher.push_stale(3))
    assert_exact(batch)
    assert set(batch.versions[batch.loss_mask]) == {3} and [s.name for s in pusher.servers] == [
        "good"
    ]
    pusher.close()
