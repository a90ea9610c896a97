"""The watchdog of controller and trainer: it finds the process that hangs, and its phase.

* A process gives signs of life (system/heartbeat.py). The ranks of a trainer wait for each other,
  so they hang when the newest sign of all ranks is too old. The rank whose sign is the oldest is
  the cause, most likely.
* A process that a signal has stopped (SIGSTOP) is found by its state.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_lite.launch.roles import Role, Roles, signal_group
from areal_lite.system import heartbeat

# A stopped process is replaced after this share of restart.hang_timeout_s.
_STOPPED_SHARE = 1 / 60
# After a longer pause between two checks, this process itself was stopped, or the machine was.
_LONGEST_PAUSE_S = 5.0
_STACK_TIMEOUT_S = 3.0
_POLL_INTERVAL_S = 0.05


@dataclass(kw_only=True)
class Life:
    """The signs of life of a process.

    Args:
        group: controller or trainer; the processes of a group wait for each other.
        phase: what it does, as it says.
        signed_at: when its newest sign was noticed, in seconds.
        stopped_at: since when it is stopped by a signal; None while it is not.
    """

    name: str
    group: str
    phase: str
    signed_at: float
    stopped_at: float | None = None


@dataclass(frozen=True)
class Hang:
    """The process that hangs, for how many seconds, and whether a signal has stopped it."""

    life: Life
    seconds: float
    stopped: bool


def find_hang(lives: list[Life], now: float, timeout_s: float) -> Hang | None:
    """Return the process that hangs at the time `now` in seconds; None if all go on."""
    for life in lives:
        if life.stopped_at is not None and now - life.stopped_at >= timeout_s * _STOPPED_SHARE:
            return Hang(life, now - life.stopped_at, True)
    for group in {life.group for life in lives}:
        signed = {life.signed_at: life for life in lives if life.group == group}
        if now - max(signed) >= timeout_s:
            return Hang(signed[min(signed)], now - min(signed), False)
    return None


class Watchdog:
    """Watches processes from their start on.

    Args:
        roles: controller and trainer ranks.
        timeout_s: `restart.hang_timeout_s`.
    """

    def __init__(self, roles: Roles, timeout_s: float):
        self._processes = roles
        self._timeout_s = timeout_s
        self._checked_at = time.monotonic()
        # By the name of a process: the time of its newest sign as its file has it, and the rest.
        self._signs: dict[str, int] = {}
        self._lives: dict[str, Life] = {}

    def check(self) -> None:
        """Raise ProcessFailed if a process hangs.

        Before that, the stacks of its group are in the logs, and it is killed.
        """
        now = time.monotonic()
        if now - self._checked_at > _LONGEST_PAUSE_S:
            self._lives.clear()  # nobody could give or notice a sign
        self._checked_at = now
        running = {role.name: role for role in self._processes.roles if role.process.poll() is None}
        lives = [self._look_at(role, now) for role in running.values()]
        if hang := find_hang(lives, now, self._timeout_s):
            group = [life for life in lives if life.group == hang.life.group]
            log_stacks(running[life.name] for life in group if life.stopped_at is None)
            role = running[hang.life.name]
            signal_group(role, signal.SIGKILL)
            raise role.failure(describe(hang))

    def _look_at(self, role: Role, now: float) -> Life:
        group = role.name.partition("-")[0]
        life = self._lives.setdefault(
            role.name, Life(name=role.name, group=group, phase="starting", signed_at=now)
        )
        sign = heartbeat.read(role.heartbeat)
        if sign is not None:
            life.phase, newest = sign
            if newest != self._signs.get(role.name):
                self._signs[role.name] = newest
                life.signed_at = now
        if not is_stopped(role.process.pid):
            life.stopped_at = None
        elif life.stopped_at is None:
            life.stopped_at = now
        return life


def describe(hang: Hang) -> str:
    """Say who hangs, since when and in which phase."""
    what = f"gave no sign of life for {hang.seconds:.0f} s"
    if hang.stopped:
        what = (
            f"has been stopped by a signal (SIGSTOP) for {hang.seconds:.0f} s, so that it cannot "
            "print its stack"
        )
    return f"{hang.life.name} hangs: it {what}; its phase: {hang.life.phase}"


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process (Linux; elsewhere it is unknown)."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"
    return False


def log_stacks(roles: Iterable[Role]) -> None:
    """Let processes print their Python stacks to their logs, and wait until they have."""
    asked = list(roles)
    logs = [role.log for role in asked]
    first = sizes = [log.stat().st_size for log in logs]
    for role in asked:
        with suppress(ProcessLookupError):
            os.kill(role.process.pid, heartbeat.STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        before, sizes = sizes, [log.stat().st_size for log in logs]
        if sizes == before and all(size > start for size, start in zip(sizes, first)):
            return
