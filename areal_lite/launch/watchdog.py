"""The watchdog of controller and trainer: it finds the process that hangs, and its phase.

* Every process has a heartbeat (system/heartbeat.py). The ranks of a trainer wait for each other,
  so they hang when the newest heartbeat of all ranks is too old. The rank with the oldest heartbeat
  is most likely the cause.
* A process that a signal has stopped (SIGSTOP) is found by its state.
"""

import os
import signal
import time
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
class ProcessState:
    """The state of a process, as the watchdog has noticed it. Times are in seconds.

    Args:
        group: controller or trainer; the processes of a group wait for each other.
        phase: the phase that its newest heartbeat names.
        beat_at: when its newest heartbeat was noticed.
        beat_ns: the time of that heartbeat in its file, in nanoseconds.
        stopped_at: when it was noticed that a signal has stopped it; None while it runs.
    """

    name: str
    group: str
    phase: str
    beat_at: float
    beat_ns: int = 0
    stopped_at: float | None = None


@dataclass(frozen=True)
class Hang:
    """The process that hangs, for how many seconds, and whether a signal has stopped it."""

    process: ProcessState
    seconds: float
    stopped: bool


def find_hang(processes: list[ProcessState], now: float, timeout_s: float) -> Hang | None:
    """Return the process that hangs at the time `now` in seconds; None if there is none."""
    for process in processes:
        if process.stopped_at is not None:
            seconds = now - process.stopped_at
            if seconds >= timeout_s * _STOPPED_SHARE:
                return Hang(process, seconds, stopped=True)
    for group in {process.group for process in processes}:
        members = [process for process in processes if process.group == group]
        if now - max(process.beat_at for process in members) >= timeout_s:
            oldest = min(members, key=lambda process: process.beat_at)
            return Hang(oldest, now - oldest.beat_at, stopped=False)
    return None


class Watchdog:
    """Watches processes from their start on.

    Args:
        roles: controller and trainer ranks.
        timeout_s: `restart.hang_timeout_s`.
    """

    def __init__(self, roles: Roles, timeout_s: float):
        self._roles = roles
        self._timeout_s = timeout_s
        self._checked_at = time.monotonic()
        self._states: dict[str, ProcessState] = {}

    def check(self) -> None:
        """Raise ProcessFailed if a process hangs.

        Before that, its group prints stacks to the logs, and the process is killed.
        """
        now = time.monotonic()
        if now - self._checked_at > _LONGEST_PAUSE_S:
            self._states.clear()  # no heartbeat could be given or noticed
        self._checked_at = now
        running = {role.name: role for role in self._roles.roles if role.process.poll() is None}
        states = [self._update_state(role, now) for role in running.values()]
        if hang := find_hang(states, now, self._timeout_s):
            group = [state for state in states if state.group == hang.process.group]
            log_stacks([running[state.name] for state in group if state.stopped_at is None])
            role = running[hang.process.name]
            signal_group(role, signal.SIGKILL)
            raise role.failure(describe(hang))

    def forget(self, role: Role) -> None:
        """Forget the heartbeats of the process that `role` has replaced."""
        self._states.pop(role.name, None)

    def _update_state(self, role: Role, now: float) -> ProcessState:
        group = role.name.partition("-")[0]
        state = self._states.setdefault(
            role.name, ProcessState(name=role.name, group=group, phase="starting", beat_at=now)
        )
        if newest := heartbeat.read(role.heartbeat):
            state.phase, beat_ns = newest
            if beat_ns != state.beat_ns:
                state.beat_ns, state.beat_at = beat_ns, now
        if not is_stopped(role.process.pid):
            state.stopped_at = None
        elif state.stopped_at is None:
            state.stopped_at = now
        return state


def describe(hang: Hang) -> str:
    """Name the process that hangs, for how long, and its phase."""
    what = f"gave no heartbeat for {hang.seconds:.0f} s"
    if hang.stopped:
        what = (
            f"has been stopped by a signal (SIGSTOP) for {hang.seconds:.0f} s, so that it cannot "
            "print its stack"
        )
    return f"{hang.process.name} hangs: it {what}; its phase: {hang.process.phase}"


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process (Linux; elsewhere it is unknown)."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"
    return False


def log_stacks(roles: list[Role]) -> None:
    """Let processes print their Python stacks to their logs, and wait until they have."""
    logs = [role.log for role in roles]
    first = sizes = [log.stat().st_size for log in logs]
    for role in roles:
        with suppress(ProcessLookupError):
            os.kill(role.process.pid, heartbeat.STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        before, sizes = sizes, [log.stat().st_size for log in logs]
        if sizes == before and all(size > start for size, start in zip(sizes, first)):
            return
