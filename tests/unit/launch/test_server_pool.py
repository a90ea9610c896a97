"""The number of restarts of a server, with servers and a clock that are not real."""

import asyncio
import fcntl
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_lite.launch import server_pool as module
from areal_lite.launch.roles import RoleFailed
from areal_lite.launch.server_pool import LOG, ServerPool
from areal_lite.run_dir.resume import open_gpus_lock
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.files import try_lock


class FailingServer:
    """A server that is ready at once and fails after some seconds of the clock."""

    name = "server-0"
    info = ServerInfo(name=name, url="http://s", api_key=None, tensor_parallel=1, pid=1)

    def __init__(self, clock: list[float], lasts_s: float):
        self._clock, self._lasts_s = clock, lasts_s

    def start(self) -> None:
        pass

    async def wait_ready(self) -> None:
        pass

    def exit_code(self) -> int:
        self._clock[0] += self._lasts_s
        return 9

    def stop(self, grace_s: float) -> None:
        pass


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Seconds, in a list of one."""
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    times = SimpleNamespace(monotonic=lambda: now[0], strftime=lambda _: "now")
    monkeypatch.setattr(module, "time", times)
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    return now


def restarts(folder: Path, clock: list[float], lasts_s: list[float]) -> list[str]:
    """Run a server whose processes last so many seconds; return what the log says about each."""
    (folder / "logs").mkdir()
    processes = iter(lasts_s)
    make = {"server-0": lambda: FailingServer(clock, next(processes))}
    pool = ServerPool(folder, make, max_restarts=2)
    with pytest.raises(RoleFailed, match="no server is left"):
        asyncio.run(pool.supervise())
    lines = (folder / "logs" / LOG).read_text().splitlines()
    return [line for line in lines if "ready" not in line]


def test_a_server_that_fails_again_and_again_is_given_up(tmp_path, clock) -> None:
    first, second, last = restarts(tmp_path, clock, [100, 1, 3000])
    assert "in 0 s (restart 1 of 2): server-0 exited with status 9" in first
    assert "in 1 s (restart 2 of 2)" in second and "given up after 2 restarts" in last


def test_a_server_that_has_worked_starts_again_at_once(tmp_path, clock) -> None:
    first, second, _ = restarts(tmp_path, clock, [29, 31, 1])
    assert "in 0 s (restart 1 of 2)" in first and "in 0 s (restart 2 of 2)" in second


def test_a_server_that_was_ready_for_an_hour_counts_anew(tmp_path, clock) -> None:
    """The restarts of a server do not add up in a run of a week."""
    said = restarts(tmp_path, clock, [100, 1, 3601, 5000, 10, 1])
    numbers = [line.split("restart ")[1][0] for line in said[:-1]]
    assert numbers == ["1", "2", "1", "1", "2"] and "given up" in said[-1]


def test_a_server_starts_when_the_trainer_has_left_its_gpus(tmp_path) -> None:
    (tmp_path / "logs").mkdir()
    trainer, events = open_gpus_lock(tmp_path), []
    assert try_lock(trainer, fcntl.LOCK_EX)

    class Server(FailingServer):
        def start(self) -> None:
            events.append("start")

        async def wait_ready(self) -> None:
            with open_gpus_lock(tmp_path) as lock:
                events.append(try_lock(lock, fcntl.LOCK_EX))

    pool = ServerPool(tmp_path, {"server-0": lambda: Server([0.0], 1)}, 0, takes_turns=True)

    async def run() -> None:
        supervision = asyncio.create_task(pool.supervise())
        await asyncio.sleep(0.5)
        assert not events
        trainer.close()
        with pytest.raises(RoleFailed):
            await supervision

    asyncio.run(run())
    assert events == ["start", False], "the trainer has no turn before it is announced"
