"""Workers are forked from a template: what they inherit, and what its end costs."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from areal_lite.workers import process
from areal_lite.workers.pool import TaskFailed, WorkerPool

TWO_GIB = 2 << 30


others: set[psutil.Process] = set()
"""Processes of other tests."""


def children() -> set[psutil.Process]:
    """Return what this process has started and what that has; other tests may have left some."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine on either event loop. Fails a test that leaves a process behind."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else None
    others.clear()
    others.update(children())
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner.run
    assert children() <= others


class Pool(WorkerPool):
    """Workers that evaluate expressions, one at a time each."""

    def __init__(self, folder: Path, size: int = 1) -> None:
        self.notes = folder / "notes"
        super().__init__(
            "expressions",
            "tests.unit.workers.evaluating",
            (str(self.notes),),
            size=size,
            silence_s=20.0,
            sequential=True,
        )

    async def value(self, expression: str) -> Any:
        return process.unpack(await self.call(expression), Any)

    async def each(self, expression: str) -> list[Any]:
        """Evaluate an expression in each worker: an idle one gets the next."""
        return await asyncio.gather(*(self.value(expression) for _ in range(self.size)))

    async def replace(self) -> None:
        """End a worker, and wait until another one has its place."""
        with pytest.raises(TaskFailed, match="status 3"):
            await self.value("os._exit(3)")
        async with asyncio.timeout(60):
            while sum(worker.usable for worker in self.workers) < self.size:
                await asyncio.sleep(0.01)

    def depth(self) -> int:
        return 1


def template() -> psutil.Process:
    (found,) = set(psutil.Process().children()) - others
    return found


def test_replacements_load_nothing_again(run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Pool(tmp_path) as pool:
            first = await pool.value("prepared, os.getpid()")
            for _ in range(3):
                await pool.replace()
            last = await pool.value("prepared, os.getpid()")
            assert first[0] == last[0] == template().pid and first[1] != last[1]
            assert pool.notes.read_text().split() == ["prepared", *["loaded"] * 4]

    run(main())


def test_each_worker_draws_random_numbers_of_its_own(run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Pool(tmp_path, size=2) as pool:
            drawn = "random.random(), numpy.random.random(), os.getpid()"
            found = await pool.each(drawn)
            await pool.replace()
            found += await pool.each(drawn)
            processes = {worker[2] for worker in found}
            assert len(processes) == 3
            for generator in (0, 1):
                assert len({worker[generator] for worker in found}) == 4

    run(main())


def test_workers_inherit_no_state_of_the_template(run, tmp_path: Path) -> None:
    """They have the signals, the session and the limits that a process of their own would have."""

    async def main() -> None:
        async with Pool(tmp_path, size=2) as pool:
            handlers = await pool.value(
                "[signal.getsignal(n) is signal.SIG_DFL for n in (17, 18, 15, 1)]"
                " + [signal.getsignal(2) is signal.default_int_handler]"
            )
            # What the shell let this process ignore, workers ignore, too.
            heard = [signal.getsignal(n) != signal.SIG_IGN for n in (1, 2)]
            assert handlers == [True] * 3 + heard
            assert await pool.value("list(signal.pthread_sigmask(signal.SIG_BLOCK, []))") == []
            pid, group, session, parent = await pool.value(
                "os.getpid(), os.getpgid(0), os.getsid(0), os.getppid()"
            )
            assert group == pid and session == parent
            dies_with = (
                "(n := ctypes.c_int(), ctypes.CDLL(None).prctl(2, ctypes.byref(n)), n.value)"
            )
            assert (await pool.value(f"{dies_with}[2]")) == signal.SIGKILL
            half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            limit = min(half, max(half // 2, TWO_GIB))
            assert await pool.value("resource.getrlimit(resource.RLIMIT_DATA)[0]") == limit
            assert await pool.value("len(os.listdir('/proc/self/task'))") == 1
            folders = set(await pool.each("os.environ['TMPDIR']"))
            assert len(folders) == 2 and all(Path(folder).is_dir() for folder in folders)

    run(main())


def test_no_process_has_the_ends_of_another(run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Pool(tmp_path, size=2) as pool:
            await pool.replace()
            own = await pool.value("descriptors()")
            # Its standard streams, its socket to the pool, and its file.
            assert own == sorted([*["/dev/null"] * 2, *["pipe"] * 3, "socket", "/tmp/"])
            keeper = await pool.value("descriptors(os.getppid())")
            assert keeper.count("socket") == 1
            assert (await pool.value("descriptors(prepared)")).count("socket") == 1

    run(main())


def test_threads_of_a_library_end_before_the_fork(run, tmp_path: Path, monkeypatch) -> None:
    """A lock that one of them held would be held for ever in the worker."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "4")

    async def main() -> None:
        async with Pool(tmp_path) as pool:
            assert template().num_threads() == 1
            product = "float((numpy.ones((400, 400)) @ numpy.ones((400, 400))).sum())"
            assert await pool.value(product) == 400**3

    run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_the_template_costs_nothing(run, tmp_path: Path, number: signal.Signals) -> None:
    async def main() -> None:
        async with Pool(tmp_path, size=2) as pool:
            pids = pool.each("(time.sleep(0.5), os.getpid())[1]")
            playing = asyncio.ensure_future(pids)
            await asyncio.sleep(0.1)
            template().send_signal(number)
            assert len(set(await playing)) == 2
            await pool.replace()
            assert len(set(await pool.each("os.getpid()"))) == 2
            assert pool.size == 2

    run(main())


def test_a_template_that_ends_while_it_forks_is_replaced(
    run, tmp_path: Path, monkeypatch, caplog
) -> None:
    fork, killed = process.Template.fork, []

    def kill_first(self: process.Template, *ends: Any) -> None:
        if len(killed) < 2:
            self.end()
            self._process = self._start()
            killed.append(self._process.pid)
            self._process.kill()
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            unknown = iter([None, None])  # to `fork`, which asks, and asks again for its signal
            self._process.poll = lambda: next(unknown, -signal.SIGKILL)
        fork(self, *ends)

    async def main() -> None:
        async with Pool(tmp_path) as pool:
            monkeypatch.setattr(process.Template, "fork", kill_first)
            await pool.replace()
            assert len(set(killed)) == 2 and pool.size == 1

    run(main())
    assert caplog.records == []


def test_a_template_that_cannot_start_is_an_error(run, tmp_path: Path, monkeypatch, capfd) -> None:
    async def start() -> None:
        pool = Pool(tmp_path)
        pool.template._module = "tests.unit.workers.missing"
        await pool.start()

    with pytest.raises(ValueError, match="a worker of expressions cannot start"):
        run(start())
    assert "tests.unit.workers.missing" in capfd.readouterr().err
