"""The reward pool, with real processes that hang, die, print and return nonsense."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import uvloop

from areal_lite.rewards.pool import RewardPool
from areal_lite.rewards.worker import load_reward_function
from areal_lite.workers.pool import Task, TaskFailed
from areal_lite.workers.process import Done, Failed
from tests.processes import running

BAD_REWARDS = '''
import os, signal, subprocess, sys, time

def length(completion, answer):
    return len(completion)

def act(completion, answer):
    """Do what the completion says."""
    if completion == "sleep":
        time.sleep(60)
    if completion == "spin":
        if answer:
            open(answer, "w").write(str(os.getpid()))
        for number in range(1, 65):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_IGN)
        while True:
            pass
    if completion.startswith("spawn"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(answer, "w").write(str(child.pid))
        os._exit(1) if completion == "spawn and exit" else time.sleep(60)
    if completion == "exit":
        os._exit(3)
    if completion == "sys.exit":
        sys.exit(0)
    if completion == "raise":
        raise ValueError("half a character \\ud800")
    if completion == "print":
        print("x" * 100_000)
        os.system("echo from a child")
        os.write(1, b"straight to the descriptor")
        return float(len(sys.stdin.read()))
    if completion == "pid":
        return os.getpid()
    if completion == "meet":  # until the test has seen all of them
        open(os.path.join(answer, str(os.getpid())), "w").close()
        while not os.path.exists(os.path.join(answer, "go")):
            time.sleep(0.01)
    if completion.startswith("nap"):
        time.sleep(float(completion[3:]))
    bad = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0"}
    return bad.get(completion, 1.0)

def of_info(completion, answer, info):
    return info["level"] * len(info["names"]["ü"])

def one_argument(completion):
    return 1.0

import asyncio
loops = []

async def coroutine(completion, answer):
    """Do what the completion says, and find the same event loop each time."""
    await asyncio.sleep(60 if completion == "sleep" else 0)
    loops.append(asyncio.get_running_loop())
    if completion == "raise":
        raise ValueError("no")
    return float("nan") if completion == "nan" else float(len(set(loops)))

if os.environ.get("BAD_REWARDS_FLAG") and os.path.exists(os.environ["BAD_REWARDS_FLAG"]):
    raise ImportError("broken since")
'''


@pytest.fixture(autouse=True)
def bad_rewards(tmp_path, monkeypatch):
    """A module `bad_rewards` that workers can import. Fails a test that leaves a process behind."""
    (tmp_path / "bad_rewards.py").write_text(BAD_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(psutil.Process().children(recursive=True))
    yield
    sys.modules.pop("bad_rewards", None)
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    for process in left:
        process.kill()
    assert not left, left


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine on either event loop."""
    with asyncio.Runner(
        loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None
    ) as runner:
        yield runner.run


class ObservedPool(RewardPool):
    """A pool that keeps its workers' replies, each of which settles one execution of a sample."""

    def __init__(self, function: str, **settings) -> None:
        super().__init__(function, **settings)
        self.replies: list[Done | Failed] = []

    def settle(self, task: Task, reply: Done | Failed) -> None:
        self.replies.append(reply)
        super().settle(task, reply)

    def reasons(self) -> Counter[str | None]:
        return Counter(getattr(reply, "reason", None) for reply in self.replies)


async def outcome(pool: RewardPool, completion: str, answer: str = "") -> float | str:
    try:
        return await pool.score(completion, answer)
    except TaskFailed as error:
        return error.reason


def test_a_function_with_info_gets_the_other_columns(run) -> None:
    async def main() -> None:
        async with RewardPool("bad_rewards:of_info") as pool:
            levels = range(1, 4)
            infos = [{"level": level, "names": {"ü": [None, 0.5]}} for level in levels]
            scores = [pool.score("", "", info) for info in infos]
            assert await asyncio.gather(*scores) == [2.0, 4.0, 6.0]

    run(main())


def test_results_belong_to_their_samples(run) -> None:
    async def main() -> None:
        async with ObservedPool("bad_rewards:length", workers=2) as pool:
            texts = ["ü" * n for n in [*range(300), 300_000, 7]]
            assert await asyncio.gather(*(pool.score(t, "") for t in texts)) == [
                len(t) for t in texts
            ]
            assert pool.reasons() == {None: len(texts)}

    run(main())


def test_every_failure_has_its_reason_and_harms_no_other_sample(run) -> None:
    expected = {
        "exit": "died",
        "sys.exit": "exception",
        "raise": "exception",
        "nan": "bad_result",
        "inf": "bad_result",
        "none": "bad_result",
        "text": "bad_result",
        "sleep": "timeout",
        "spin": "timeout",
        "print": 0.0,
        "fine": 1.0,
    }
    samples = [*expected, *["fine"] * 20] * 2

    async def main() -> None:
        async with ObservedPool("bad_rewards:act", workers=2, timeout_s=1.0) as pool:
            outcomes = await asyncio.gather(*(outcome(pool, s) for s in samples))
            assert dict(zip(samples, outcomes)) == expected
            assert outcomes == [expected[s] for s in samples]
            failed = {"died": 2, "exception": 4, "bad_result": 8, "timeout": 4}
            assert pool.reasons() == {None: len(samples) - 18, **failed}
            assert sum(reply.seconds for reply in pool.replies) >= 4 * 1.0

    run(main())


def test_pipelined_samples_survive_the_one_that_kills_their_process(run) -> None:
    """After many fast samples several are sent ahead; those behind a killed one run elsewhere."""

    async def main() -> None:
        async with ObservedPool("bad_rewards:act", timeout_s=1.0) as pool:
            await asyncio.gather(*(pool.score("fine", "") for _ in range(300)))
            samples = ["fine", "sleep", "fine", "exit", "fine", "fine", "spin", "fine"]
            outcomes = await asyncio.gather(*(outcome(pool, s) for s in samples))
            assert outcomes == [1.0, "timeout", 1.0, "died", 1.0, 1.0, "timeout", 1.0]
            assert pool.reasons()[None] == 305

    run(main())


def test_time_in_the_queue_is_not_execution(run) -> None:
    async def main() -> None:
        async with RewardPool("bad_rewards:act", timeout_s=1.0) as pool:
            assert await asyncio.gather(*(pool.score("nap0.3", "") for _ in range(6))) == [1.0] * 6
            # From here on samples wait in the worker's pipe.
            await asyncio.gather(*(pool.score("fine", "") for _ in range(300)))
            assert await asyncio.gather(*(pool.score("nap0.3", "") for _ in range(6))) == [1.0] * 6

    run(main())


def test_a_busy_event_loop_is_not_a_slow_function(run) -> None:
    async def main() -> None:
        async with RewardPool("bad_rewards:act", timeout_s=1.0) as pool:
            scores = asyncio.gather(*(pool.score("nap0.01", "") for _ in range(3)))
            await asyncio.sleep(0)
            time.sleep(1.5)
            assert await scores == [1.0] * 3

    run(main())


def test_the_loop_stays_free_and_workers_run_in_parallel(run, tmp_path: Path) -> None:
    async def main() -> None:
        async with RewardPool("bad_rewards:act", workers=4) as pool:
            scores = asyncio.gather(*(pool.score("meet", str(tmp_path)) for _ in range(4)))
            while len(list(tmp_path.iterdir())) < 4:
                await asyncio.sleep(0.01)
            assert not scores.done()
            (tmp_path / "go").touch()
            assert await scores == [1.0] * 4

    run(main())


@pytest.mark.parametrize(
    ("what", "reason"), [("spin", "timeout"), ("spawn", "timeout"), ("spawn and exit", "died")]
)
def test_nothing_that_a_failed_function_started_is_left(
    run, tmp_path: Path, what: str, reason: str
) -> None:
    async def main() -> None:
        async with RewardPool("bad_rewards:act", timeout_s=0.4) as pool:
            assert await outcome(pool, what, str(tmp_path / "pid")) == reason
            await wait_until_gone(int((tmp_path / "pid").read_text()))

    run(main())


def test_a_cancelled_sample_is_not_executed(run) -> None:
    async def main() -> None:
        async with ObservedPool("bad_rewards:act", timeout_s=5) as pool:
            running, waiting = (asyncio.create_task(pool.score("nap0.1", "")) for _ in range(2))
            await asyncio.sleep(0.02)
            running.cancel()
            waiting.cancel()
            assert await pool.score("fine", "") == 1.0
            assert pool.reasons() == {None: 2}  # the one that had begun, and the last

    run(main())


def test_close_ends_samples_and_processes(run) -> None:
    async def main() -> None:
        pool = RewardPool("bad_rewards:act", workers=2)
        with pytest.raises(RuntimeError, match="not been started"):
            await pool.score("fine", "")
        await pool.start()
        pids = [int(await pool.score("pid", "")) for _ in range(2)]
        scores = [asyncio.create_task(pool.score("spin", "")) for _ in range(5)]
        await asyncio.sleep(0.05)
        await pool.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        for score in scores:
            with pytest.raises(RuntimeError, match="closed"):
                await score
        await pool.close()

    run(main())


def test_a_pool_that_closes_while_it_replaces_a_worker_reports_no_error(run, caplog) -> None:
    async def main() -> None:
        async with RewardPool("bad_rewards:act") as pool:
            assert await outcome(pool, "exit") == "died"

    run(main())
    assert caplog.records == []


def test_an_idle_worker_that_dies_is_replaced(run) -> None:
    async def main() -> None:
        async with RewardPool("bad_rewards:act") as pool:
            pid = int(await pool.score("pid", ""))
            os.kill(pid, signal.SIGKILL)
            await wait_until_gone(pid)
            await asyncio.sleep(0.1)
            assert await pool.score("pid", "") != pid

    run(main())


def test_a_pool_without_workers_raises(run, tmp_path: Path, monkeypatch) -> None:
    flag = tmp_path / "flag"
    monkeypatch.setenv("BAD_REWARDS_FLAG", str(flag))

    async def main() -> None:
        async with RewardPool("bad_rewards:act") as pool:
            flag.touch()
            waiting = (
                asyncio.create_task(outcome(pool, "exit")),
                asyncio.create_task(pool.score("fine", "")),
            )
            assert await waiting[0] == "died"
            with pytest.raises(RuntimeError, match="broken since"):
                await waiting[1]
            with pytest.raises(RuntimeError, match="no worker of bad_rewards:act is left"):
                await pool.score("fine", "")

    run(main())


def test_an_async_function_is_awaited_and_can_fail_like_any_other(run) -> None:
    async def main() -> None:
        async with RewardPool("bad_rewards:coroutine", timeout_s=0.3) as pool:
            samples = ["fine", "raise", "nan", "fine", "sleep", "fine"]
            outcomes = await asyncio.gather(*(outcome(pool, s) for s in samples))
            assert outcomes == [1.0, "exception", "bad_result", 1.0, "timeout", 1.0]

    run(main())


def test_a_failed_start_leaves_no_process(run) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="no callable 'missing'"):
            await RewardPool("bad_rewards:missing", workers=2).start()

    run(main())


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_die_with_the_process_that_owns_them(tmp_path: Path, stopped: bool) -> None:
    """Even busy ones, which do not notice that their input has ended, and stopped ones."""
    script = """
import asyncio, sys
from areal_lite.rewards.pool import RewardPool
async def main():
    async with RewardPool("bad_rewards:act", workers=2) as pool:
        await asyncio.gather(*(pool.score("spin", file) for file in sys.argv[1:]))
asyncio.run(main())
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    files = [tmp_path / "one", tmp_path / "two"]
    owner = subprocess.Popen([sys.executable, "-c", script, *map(str, files)], env=env)
    try:
        while not all(file.is_file() and file.read_text() for file in files):
            time.sleep(0.01)
            assert owner.poll() is None
    finally:
        workers = psutil.Process(owner.pid).children(recursive=True)
        if stopped:
            for process in workers:
                process.suspend()
        owner.kill()
        owner.wait()
    _, left = psutil.wait_procs(workers, timeout=10)  # the keepers, which clean up, and the workers
    for process in left:
        process.kill()
    assert not left


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("bad_rewards", "must be module:name"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("bad_rewards:missing", "no callable 'missing'"),
        ("bad_rewards:one_argument", "called as f"),
    ],
)
def test_load_reward_function_refuses(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load_reward_function(name)


def test_load_reward_function_loads() -> None:
    assert load_reward_function("areal_lite.rewards.exact:exact_reward")(" a\n", "a") == 1.0
    assert load_reward_function("areal_lite.rewards.exact:exact_reward")("b", "a") == 0.0


def test_math_reward_in_a_worker() -> None:
    """Math-Verify's own time-outs must not be needed, and equal expressions must be equal."""

    async def main() -> None:
        async with RewardPool("areal_lite.rewards.math:math_reward") as pool:
            assert await pool.score(r"so it is \boxed{\frac{1}{2}}", "0.5") == 1.0
            assert await pool.score(r"so it is \boxed{(x+1)^2}", "x^2+2x+1") == 1.0
            assert await pool.score(r"so it is \boxed{3}", "$4$") == 0.0
            assert await pool.score("no idea", "4") == 0.0
            assert await outcome(pool, "4", "") == "exception"

    asyncio.run(main())


async def wait_until_gone(pid: int) -> None:
    """Wait until this process does not run."""
    for _ in range(500):
        if not running([pid]):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")
