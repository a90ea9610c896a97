"""The watchdog: which process hangs, in which phase, and with which stack."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from areal_lite.launch import local as watchdog
from areal_lite.launch.local import Watchdog, find_hang
from areal_lite.launch.roles import ProcessFailed, Role, Roles
from areal_lite.system.heartbeat import ENV_HEARTBEAT

BUSY = """
import sys, threading, time
from areal_lite.system import heartbeat

def blocked():
    with lock:
        lock.acquire()

heartbeat.start("loading")
lock = threading.Lock()
heartbeat.enter("training step 3")
if sys.argv[1] == "blocked":
    blocked()
while True:
    heartbeat.beat()
    time.sleep(0.02)
"""


def state(name: str, beat_at: float, stopped_at: float | None = None) -> Role:
    nowhere = Path("nowhere")
    return Role(name, Mock(), nowhere, 0, nowhere, beat_at=beat_at, stopped_at=stopped_at)


def hanging(*processes: Role) -> tuple[str, bool] | None:
    """Return which one hangs at 1,000 s with a limit of 600 s, and whether it is stopped."""
    hang = find_hang(list(processes), 1000.0, 600.0)
    return (hang[0].name, "SIGSTOP" in hang[1]) if hang else None


def test_a_group_hangs_when_its_newest_heartbeat_is_old_and_the_oldest_names_the_cause() -> None:
    controller = state("controller", 999.0)
    assert hanging(controller, state("trainer-0", 100.0), state("trainer-1", 401.0)) is None
    assert hanging(controller, state("trainer-0", 400.0), state("trainer-1", 100.0)) == (
        "trainer-1",
        False,
    )
    assert hanging(state("controller", 400.0), state("trainer", 999.0)) == ("controller", False)


def test_a_stopped_process_is_named_though_the_others_wait_for_it() -> None:
    ranks = (state("trainer-0", 300.0), state("trainer-1", 990.0, stopped_at=990.0))
    assert hanging(*ranks) == ("trainer-1", True)
    assert hanging(state("trainer", 990.0, stopped_at=991.0)) is None


def start(roles: Roles, name: str, kind: str) -> Role:
    """Start a process that `blocked` or that has a heartbeat; wait until it trains."""
    role = roles.start(name, [sys.executable, "-c", BUSY, kind])
    until(lambda: role.heartbeat.exists() and role.heartbeat.read_text() == "training step 3")
    return role


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def failure(dog: Watchdog) -> ProcessFailed:
    """Check until a process hangs."""
    with pytest.raises(ProcessFailed) as raised:
        until(dog.check)  # `check` returns None
    return raised.value


def test_a_deadlock_is_found_its_stack_logged_and_the_process_killed(tmp_path: Path) -> None:
    with Roles(tmp_path) as roles:
        start(roles, "controller", "busy")
        blocked = start(roles, "trainer", "blocked")
        failed = failure(Watchdog(roles, 2.0))
        assert blocked.process.wait(10) == -signal.SIGKILL
    assert failed.role is blocked
    assert failed.what.startswith("trainer hangs: it gave no heartbeat for ")
    assert failed.what.endswith("its phase: training step 3")
    assert "in blocked" in blocked.output() and "in blocked" in str(failed)


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("kind", ["busy", "blocked"])
def test_without_a_supervisor_a_process_ends_itself(tmp_path, kind: str, supervised: bool) -> None:
    code = BUSY.replace("heartbeat.enter", "heartbeat.limit(3.0)\nheartbeat.enter")
    file = {ENV_HEARTBEAT: str(tmp_path / "beat")} if supervised else {}
    process = subprocess.Popen(
        [sys.executable, "-c", code, kind], env=os.environ | file, stderr=subprocess.PIPE
    )
    try:
        if kind == "blocked" and not supervised:
            assert process.wait(30) == 1
            assert process.stderr and b"in blocked" in process.stderr.read()
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(6)
    finally:
        process.kill()
        process.wait()


def test_a_stopped_process_is_found_long_before(tmp_path: Path) -> None:
    with Roles(tmp_path) as roles:
        ranks = [start(roles, f"trainer-{rank}", "busy") for rank in range(2)]
        dog = Watchdog(roles, 30.0)
        dog.check()
        os.kill(ranks[1].process.pid, signal.SIGSTOP)
        failed = failure(dog)
        assert ranks[1].process.wait(10) == -signal.SIGKILL
    assert failed.role is ranks[1] and "stopped by a signal (SIGSTOP)" in failed.what
    assert "in <module>" in ranks[0].output(), "the others show where they wait"


def test_a_pause_of_the_watchdog_itself_is_not_a_hang(tmp_path: Path, monkeypatch) -> None:
    with Roles(tmp_path) as roles:
        start(roles, "trainer", "blocked")
        dog = Watchdog(roles, 600.0)
        dog.check()
        now = time.monotonic() + 3600
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
        dog.check()
