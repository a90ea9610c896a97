"""The sandbox holds: each program below tries to break out and fails."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import uvloop

from areal_lite.rewards.pool import RewardPool
from areal_lite.rewards.program import program_reward
from areal_lite.rewards.sandbox.run import (
    Limits,
    Outcome,
    SandboxError,
    run_python,
)
from tests.processes import running

HARMLESS = [
    ("print(sum(map(int, input().split())))", "1 2\n", "3\n"),
    ("import sys; print(sys.argv, __name__)", "", "['program.py'] __main__\n"),
    (
        "import threading as t; x = t.Thread(target=print, args=('thread',)); x.start(); x.join()",
        "",
        "thread\n",
    ),
    (
        "open('a', 'w').write('x'); import os; os.mkdir('d'); print(sorted(os.listdir()))",
        "",
        "['a', 'd', 'program.py']\n",
    ),
    (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nprint(A(), 'ä')",
        "",
        "A(x=1) ä\n",
    ),
    ("import tempfile; print(tempfile.TemporaryFile().write(b'abc'))", "", "3\n"),
    ("print('surrogate', ascii('\ud800'))", "", None),
]
REFUSED = {  # a test run survives each of them, should the sandbox let it through
    "fork bomb": ("import os\nfor _ in range(6): os.fork()", "OSError"),
    "fork by libc": (
        "import ctypes\nassert ctypes.CDLL(None).fork() == -1\n"
        "assert ctypes.CDLL(None).vfork() == -1\nraise OSError('refused')",
        "OSError",
    ),
    "command": ("import subprocess\nsubprocess.run(['/bin/true'])", "OSError"),
    "exec": ("import os\nos.execv('/bin/true', ['true'])", "OSError"),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(10**8))", "MemoryError"),
    "socket": ("import socket\nsocket.socket(socket.AF_INET)", "OSError"),
    "unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", "OSError"),
    "passwd": ("open('/etc/passwd')", "PermissionError"),
    "home": (f"import os\nos.listdir({str(Path.home())!r})", "PermissionError"),
    "this file": (f"open({__file__!r})", "PermissionError"),
    "environment": ("open(f'/proc/{__import__(\"os\").getppid()}/environ')", "PermissionError"),
    "own processes": ("import os\nos.listdir('/proc')", "PermissionError"),
    "write outside": ("open('../outside', 'w')", "PermissionError"),
    "rename out": ("import os\nos.rename('program.py', '../program.py')", "PermissionError"),
    "truncate": (f"import os\nos.truncate({__file__!r}, 0)", "OSError"),
    "change mode": (f"import os\nos.chmod({__file__!r}, 0)", "OSError"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", "OSError"),
    "kill all": ("import os\nos.kill(-1, 0)", "OSError"),
    "raise a limit": ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))", "OSError"),
    "limit the parent": (
        "import os, resource as r\nr.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))",
        "OSError",
    ),
    "large file": ("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))", "OSError"),
    "many open files": ("x = [open('program.py') for _ in range(100)]", "OSError"),
}


def sandboxed(code: str, stdin: str = "", **limits) -> Outcome:
    return asyncio.run(run_python(code, stdin, Limits(**limits)))


def scratch_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("areal-lite-sandbox-*"))


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # that of no other process
    before = set(psutil.Process().children(recursive=True)), scratch_folders()
    yield
    assert (set(psutil.Process().children(recursive=True)), scratch_folders()) == before


@pytest.mark.parametrize(("code", "stdin", "stdout"), HARMLESS)
def test_programs_run(code: str, stdin: str, stdout: str | None) -> None:
    outcome = sandboxed(code, stdin)
    assert outcome.ok, outcome
    assert stdout is None or outcome.stdout == stdout


@pytest.mark.parametrize("name", REFUSED)
def test_harmful_programs_are_refused(name: str) -> None:
    code, error = REFUSED[name]
    outcome = sandboxed(code, memory_mb=300)
    assert outcome.ended == "exit" and outcome.status == 1, outcome
    assert error in outcome.stderr.splitlines()[-1]
    assert "program.py" in outcome.stderr and "confine.py" not in outcome.stderr


def test_programs_do_not_see_our_environment(monkeypatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    assert sandboxed("import os; print('API_KEY' in os.environ)").stdout == "False\n"


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(60)", "timeout"),
        (
            "import os, signal\n"
            "for s in range(1, 32): s in (9, 19) or signal.signal(s, signal.SIG_IGN)\n"
            "while True: pass",
            "timeout",
        ),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
    ],
)
def test_endless_programs_are_killed(code: str, ended: str) -> None:
    assert sandboxed(code, time_s=0.3).ended == ended


def test_the_outcome_says_how_a_program_ended() -> None:
    assert sandboxed("import sys; sys.exit(3)").status == 3
    assert sandboxed("import os; os.abort()").status == -6
    assert sandboxed("def f(:").stderr.endswith("SyntaxError: invalid syntax\n")
    assert sandboxed("pass", stdin="x" * 10**6).ok  # it need not read what it is given


def test_a_program_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import asyncio\nfrom areal_lite.rewards.sandbox.run import *\n"
        "asyncio.run(run_python('import time; time.sleep(60)', limits=Limits(time_s=60)))"
    )
    place = tmp_path / "owner"
    place.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(place)})
    try:
        while not (children := psutil.Process(owner.pid).children()) or not list(
            place.glob("*/program.py")
        ):
            time.sleep(0.01)
        time.sleep(0.1)
    finally:
        owner.kill()
        owner.wait()
    psutil.wait_procs(children, timeout=10)
    assert running(child.pid for child in children) == []


ADD = "def add(a, b):\n    return a + b\n"


def test_a_program_that_cannot_be_confined_does_not_run(monkeypatch) -> None:
    """It is an error, neither a failed program nor one that runs unconfined."""
    monkeypatch.setattr("areal_lite.rewards.sandbox.run._settings", lambda limits: {"parent": 1})
    with pytest.raises(SandboxError, match="parent is gone"):
        asyncio.run(program_reward(ADD, "assert add(1, 2) == 3"))


def test_the_pool_goes_on_after_any_program() -> None:
    async def main() -> None:
        async with RewardPool("areal_lite.rewards.program:program_reward", workers=2) as pool:
            bad = [code for code, _ in REFUSED.values()]
            scores = await asyncio.gather(
                *(pool.score(code, "assert False") for code in bad),
                *(pool.score(ADD, "assert add(1, 2) == 3") for _ in range(3)),
            )
            assert scores == [0.0] * len(bad) + [1.0] * 3
            assert len(pool.workers) == 2

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_others_may_send_many_descriptors_meanwhile() -> None:
    """The kernel counts descriptors in flight over all processes of the user."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with here, there:
        for _ in range(10):
            socket.send_fds(here, [b"x"], [0] * 20)
        assert asyncio.run(run_python("print(1)")).stdout == "1\n"
