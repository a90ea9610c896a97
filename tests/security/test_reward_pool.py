"""Reward functions that break the pool's protocol, leave processes behind or take all memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from areal_lite.rewards.pool import RewardPool
from areal_lite.rewards.program import parse_tests
from areal_lite.workers.pool import TaskFailed

REWARDS = """
import asyncio, decimal, fractions, numpy, os, struct, subprocess, sys, tempfile, time

class Wordless:
    def __repr__(self):
        raise ValueError("no")

class WordlessError(Exception):
    __str__ = Wordless.__repr__

class NoFloat(fractions.Fraction):
    def __float__(self):
        raise ZeroDivisionError

RESULTS = {
    "large": 10**400,
    "larger": 10**5000,
    "too large for the trainer": 1e39,
    "fraction": fractions.Fraction(1, 4),
    "truth of numpy": numpy.array([1, 1]).all(),
    "decimal": decimal.Decimal("0.5"),
    "several": numpy.array([1.0, 1.0]),
    "large fraction": fractions.Fraction(10**400),
    "no float": NoFloat(1),
    "wordless": Wordless(),
    "complex": 1j,
}
ERRORS = {
    "interrupt": KeyboardInterrupt,
    "generator": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "base": BaseException,
    "wordless error": WordlessError,
}

def reward(what, answer):
    if what == "memory":
        return len(bytearray(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 2 // 3))
    if what.startswith("write "):
        for fd in range(3, 20):
            try:
                if os.readlink(f"/proc/self/fd/{fd}").startswith(("pipe", "socket")):
                    os.write(fd, bytes.fromhex(what.split()[1]))
            except OSError:
                pass
        return 1.0
    if what == "fork":
        os.fork()
        return 1.0
    if what == "fork and raise":
        if os.fork() == 0:
            raise SystemExit(3)
        return 1.0
    if what.startswith("daemon"):
        code = (
            "import os, sys, time; os.fork() and os._exit(0); os.setsid();"
            "os.fork() and os._exit(0); open(sys.argv[1], 'w').write(str(os.getpid()));"
            "time.sleep(600)"
        )
        subprocess.run([sys.executable, "-I", "-S", "-c", code, answer])
        while not (os.path.exists(answer) and open(answer).read()):
            time.sleep(0.01)
        if what == "daemon and exit":
            os._exit(1)
        if what == "daemon and sleep":
            time.sleep(600)
        if what == "daemon and kill the group":
            os.killpg(0, 9)
    if what.startswith("files"):
        folder = tempfile.mkdtemp()
        open(answer, "w").write(folder)
        for _ in range(50):
            folder += "/" + "d" * 30
            os.mkdir(folder)
        if what == "files and sleep":
            time.sleep(600)
    if what == "priority":
        return int(open("/proc/self/oom_score_adj").read())
    if what in ERRORS:
        raise ERRORS[what]("stop")
    return RESULTS.get(what, 1.0)

async def coroutine(what, answer):
    await asyncio.sleep(0)
    return reward(what, answer)
"""


@pytest.fixture(autouse=True)
def odd_rewards(tmp_path: Path, monkeypatch):
    """A module `odd_rewards`, and a folder for temporary files, which must be empty in the end."""
    (tmp_path / "odd_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    sys.modules.pop("odd_rewards", None)
    assert list(temporary.iterdir()) == []


def scores(
    *samples: str, answer: str = "", function: str = "reward", timeout_s: float = 5.0
) -> list[float | str]:
    """Score one sample after the other in one worker; a failure gives its reason."""

    async def main() -> list[float | str]:
        results: list[float | str] = []
        async with RewardPool(f"odd_rewards:{function}", timeout_s=timeout_s) as pool:
            for sample in samples:
                try:
                    async with asyncio.timeout(30):
                        results.append(await pool.score(sample, answer))
                except TaskFailed as error:
                    results.append(error.reason)
        return results

    return asyncio.run(main())


@pytest.mark.parametrize("function", ["reward", "coroutine"])
def test_odd_results_and_errors_are_no_death(function: str) -> None:
    samples = {
        "large": "bad_result",
        "larger": "bad_result",
        "too large for the trainer": "bad_result",
        "fraction": 0.25,
        "truth of numpy": 1.0,
        "decimal": 0.5,
        "several": "bad_result",
        "large fraction": "bad_result",
        "no float": "bad_result",
        "wordless": "bad_result",
        "complex": "bad_result",
        "interrupt": "exception",
        "generator": "exception",
        "cancelled": "exception",
        "base": "exception",
        "wordless error": "exception",
        "\ud800": "exception",
        "fine": 1.0,
    }
    assert scores(*samples, function=function) == list(samples.values())


@pytest.mark.parametrize(
    "garbage",
    [
        "ffffff7f",  # a frame that never ends
        "00000000",  # an empty frame
        "0100000080",  # no Reply
        "0500000095ffcb00",  # half a Reply
        "0300000093c0c0",
        "0c000000" + "94cd03e8cb3ff0000000000000"[:24],  # a Reply to another request
        "64000000" + "91" * 100,  # deep
        "e8030000" + "91" * 1000,  # deeper
    ],
)
def test_a_function_that_writes_to_the_pipe_fails_alone(garbage: str) -> None:
    results = scores("fine", f"write {garbage}", "fine", "fine", timeout_s=2.0)
    assert results[0] == 1.0 and results[2:] == [1.0, 1.0]
    assert results[1] in ("died", "timeout")


def test_forged_replies_reach_no_other_sample() -> None:
    """Two replies for a later request, as they were accepted when requests had no number."""
    forged = "0b00000092" + "cb3ff0000000000000"[:18] + "07"
    numbered = "0c0000009302" + "cb3ff0000000000000"[:18] + "07"
    for frames in (forged * 2, numbered * 2):
        results = scores("fine", f"write {frames}", "fraction", "fraction")
        assert results[1:] == ["died", 0.25, 0.25]


@pytest.mark.parametrize("what", ["fork", "fork and raise"])
def test_a_forked_child_does_not_reply(what: str) -> None:
    assert scores(what, "fraction", what, "fraction") == [1.0, 0.25, 1.0, 0.25]


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("daemon", 1.0),
        ("daemon and exit", "died"),
        ("daemon and sleep", "timeout"),
        ("daemon and kill the group", "died"),
    ],
)
def test_daemons_end_with_their_worker(tmp_path: Path, what: str, result: float | str) -> None:
    file = tmp_path / "pid"
    assert scores(what, answer=str(file), timeout_s=1.0 if "sleep" in what else 20.0) == [result]
    assert not psutil.pid_exists(int(file.read_text()))


@pytest.mark.parametrize("what", ["files", "files and sleep"])
def test_temporary_files_end_with_their_worker(tmp_path: Path, what: str) -> None:
    file = tmp_path / "folder"
    scores(what, answer=str(file), timeout_s=1.0)
    assert Path(file.read_text()).is_relative_to(tmp_path / "temporary")
    assert not Path(file.read_text()).exists()


def test_all_ends_when_the_owner_of_the_pool_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import asyncio, sys\nfrom areal_lite.rewards.pool import RewardPool\n"
        "async def main():\n"
        "    async with RewardPool('odd_rewards:reward', timeout_s=60) as pool:\n"
        "        await pool.score('daemon and sleep', sys.argv[1])\n"
        "asyncio.run(main())"
    )
    path = os.pathsep.join(filter(None, sys.path))
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(file)], env=os.environ | {"PYTHONPATH": path}
    )
    try:
        while not (file.exists() and file.read_text()):
            time.sleep(0.01)
            assert owner.poll() is None
    finally:
        owner.kill()
        owner.wait()
    _wait_for(lambda: not psutil.pid_exists(int(file.read_text())))
    _wait_for(lambda: not list((tmp_path / "temporary").iterdir()))


def test_a_worker_cannot_take_all_memory() -> None:
    assert scores("memory", "priority", "fine") == ["exception", 1000.0, 1.0]


@pytest.mark.parametrize(
    "limits",
    [
        '"time_limit_s": 0',
        '"time_limit_s": -1',
        '"time_limit_s": 1e308',
        '"time_limit_s": NaN',
        '"time_limit_s": "5"',
        '"memory_mb": 0',
        '"memory_mb": -5',
        '"memory_mb": 1',
        '"memory_mb": 99999999999999',
        '"memory_mb": 100.5',
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: str) -> None:
    with pytest.raises(ValueError, match="answer") as error:
        parse_tests(f'{{"tests": "assert True", {limits}}}')
    assert "\n" not in str(error.value)


def test_a_program_must_be_stopped_before_the_pool_stops_it() -> None:
    answer = '{"tests": "assert True", "time_limit_s": 15}'
    assert parse_tests(answer, 15.1).time_limit_s == 15
    with pytest.raises(ValueError, match=r"time_limit_s=15 must be less than reward.timeout_s=15"):
        parse_tests(answer, 15.0)

    async def main() -> None:
        async with RewardPool("areal_lite.rewards.program:program_reward", timeout_s=3.0) as pool:
            with pytest.raises(TaskFailed, match="time_limit_s=5 must be less than"):
                await pool.score("pass", "assert True")
            slow = '{"tests": "assert True", "time_limit_s": 0.5}'
            assert await pool.score("while True: pass", slow) == 0.0

    asyncio.run(main())


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
