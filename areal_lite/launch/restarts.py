"""The restarts of controller and trainer during a run on one machine. The servers keep running.

* A controller that is killed or hangs starts again alone. The trainer keeps its step and its batch,
  and asks the new controller what the old one did not answer (controller/batches.py).
* After any other failure both start again, from the newest checkpoint. The new trainer pushes its
  weights to the servers before they get another request (Fleet.take_over).
* A process that was killed or hangs is started again, a limited number of times. After an error it
  is started again only if that can help: not before the first step, and not twice at one place.
* The ranks of a trainer wait for each other, so they hang when the newest heartbeat of all
  (system/heartbeat.py) is too old. The oldest one most likely names the cause. A process that a
  signal has stopped (SIGSTOP) is found by its state.
"""

import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from areal_lite.config import TrainConfig
from areal_lite.launch.roles import ProcessFailed, Role, RoleFailed, Roles, signal_group
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import LOGS_DIR
from areal_lite.run_dir.resume import (
    CONTROLLER_FILES,
    ROLE_FILES,
    remove_files,
    set_aside_damaged,
    start_version,
    stop_requested,
)
from areal_lite.system import heartbeat
from areal_lite.system.files import append_log
from areal_lite.system.processes import back_off_s

# Failures older than this do not count.
_WINDOW_S = 3600.0
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a process, and with it of all processes of controller and trainer.

    Args:
        at_s: when it was noticed, in seconds of any clock.
        error: what identifies the error that it reported; None if it was killed or hung.
        progressed: whether a training step was completed since the start of the process and
            steps are left.
    """

    at_s: float
    error: str | None = None
    progressed: bool = False


@dataclass(frozen=True)
class Restart:
    """Start controller and trainer again after `delay_s` seconds, for the `number`-th time."""

    delay_s: float
    number: int


def decide(failures: list[Failure], most: int) -> Restart | str:
    """Return the restart after the last of all `failures` of this run, or why the run ends.

    The wait before a restart grows with each start that made no progress. `most`: `restart.max`.
    """
    last = failures[-1]
    recent = [one for one in failures if last.at_s - one.at_s <= _WINDOW_S]
    if most == 0:
        return "restart.max=0: nothing is started again"
    if last.error is not None and not last.progressed:
        return (
            "no step was completed before this error, or none is left: another start would fail "
            "like this one"
        )
    if last.error is not None and last.error in (one.error for one in recent[:-1]):
        return "the same error came twice: another start would fail like this one"
    if len(recent) > most:
        return f"there were {most} restarts within an hour (restart.max)"
    in_vain = len(list(takewhile(lambda one: not one.progressed, reversed(recent))))
    return Restart(back_off_s(max(in_vain, 1)), len(recent))


def error_identity(log: str) -> str:
    """Return the place and the message of an error, which are equal for two reports of it.

    `log` ends with the report. Numbers in the message may differ, such as that of a step.
    """
    frames = list(_FRAME.finditer(log))
    place = f"{frames[-1]['file']}:{frames[-1]['line']} " if frames else ""
    lines = [line for line in log.splitlines() if line.strip()]
    return place + re.sub(r"\d+", "#", lines[-1] if lines else "")


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
        phase: the phase that its newest heartbeat names.
        beat_at: when its newest heartbeat was noticed.
        beat_ns: the time of that heartbeat in its file, in nanoseconds.
        stopped_at: when it was noticed that a signal has stopped it; None while it runs.
    """

    name: str
    phase: str = "starting"
    beat_at: float
    beat_ns: int = 0
    stopped_at: float | None = None

    @property
    def group(self) -> str:
        """Return controller or trainer. The processes of a group wait for each other."""
        return self.name.partition("-")[0]


def find_hang(
    processes: list[ProcessState], now: float, timeout_s: float
) -> tuple[ProcessState, str] | None:
    """Return the process that hangs at the time `now` in seconds, and how; None without one."""
    for process in processes:
        stopped_s = 0.0 if process.stopped_at is None else now - process.stopped_at
        if stopped_s >= timeout_s * _STOPPED_SHARE:
            return process, (
                f"has been stopped by a signal (SIGSTOP) for {stopped_s:.0f} s, so that it cannot "
                "print its stack"
            )
    for group in {process.group for process in processes}:
        members = [process for process in processes if process.group == group]
        if now - max(process.beat_at for process in members) >= timeout_s:
            oldest = min(members, key=lambda process: process.beat_at)
            return oldest, f"gave no heartbeat for {now - oldest.beat_at:.0f} s"
    return None


class Watchdog:
    """Watches controller and trainer ranks. `timeout_s` is `restart.hang_timeout_s`."""

    def __init__(self, roles: Roles, timeout_s: float):
        self._roles = roles
        self._timeout_s = timeout_s
        self._checked_at = time.monotonic()
        self._states: dict[str, ProcessState] = {}

    def check(self) -> None:
        """Kill the process that hangs, and raise ProcessFailed. Its group logs stacks before."""
        now = time.monotonic()
        if now - self._checked_at > _LONGEST_PAUSE_S:
            self._states.clear()  # no heartbeat could be given or noticed
        self._checked_at = now
        running = {role.name: role for role in self._roles.roles if role.process.poll() is None}
        states = [self._update_state(role, now) for role in running.values()]
        if hang := find_hang(states, now, self._timeout_s):
            process, how = hang
            group = [state for state in states if state.group == process.group]
            log_stacks([running[state.name] for state in group if state.stopped_at is None])
            role = running[process.name]
            signal_group(role, signal.SIGKILL)
            text = f"{process.name} hangs: it {how}; its phase: {process.phase}"
            raise ProcessFailed(role, text)

    def forget(self, role: Role) -> None:
        """Forget the heartbeats of the process that `role` has replaced."""
        self._states.pop(role.name, None)

    def _update_state(self, role: Role, now: float) -> ProcessState:
        new = ProcessState(name=role.name, beat_at=now)
        state = self._states.setdefault(role.name, new)
        if newest := heartbeat.read(role.heartbeat):
            state.phase, beat_ns = newest
            if beat_ns != state.beat_ns:
                state.beat_ns, state.beat_at = beat_ns, now
        if not is_stopped(role.process.pid):
            state.stopped_at = None
        elif state.stopped_at is None:
            state.stopped_at = now
        return state


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


LOG = "restarts.log"


class Restarts:
    """Decides after each failure, and prepares the next start, which continues from `start`."""

    def __init__(self, config: TrainConfig, run_dir: Path):
        self._config = config
        self._run_dir = run_dir
        self._failures: list[Failure] = []
        # The failure to show first if the run ends: the first one of those without progress.
        self._cause: ProcessFailed | None = None
        self.start = start_version(run_dir)

    def prepare(self, failed: ProcessFailed) -> None:
        """Log the failure, wait, and prepare the run directory for the next start of all roles.

        Raises RoleFailed when the run must end.
        """
        if stop_requested(self._run_dir):
            self._record(failed)
            raise self._end(failed, "the run was asked to stop")
        restart = self._decide(failed)
        try:
            set_aside_damaged(self._run_dir)
        except ValueError as error:
            raise self._end(failed, str(error)) from error
        remove_files(self._run_dir, ROLE_FILES)
        self.start = start_version(self._run_dir)
        self._wait(failed, restart, f"controller and trainer start again from step {self.start}")

    def alone(self, failed: ProcessFailed) -> bool:
        """Return whether a controller failed that can start again under the trainer.

        One that reports an error has told the ranks, which end, too. The batches of a replay buffer
        are not recorded before the end of their step.
        """
        role = failed.role
        reported = (role.process.poll() or 0) > 0
        replays = self._config.buffer.replay.capacity > 0
        return role.name == "controller" and not reported and not replays

    def prepare_controller(self, failed: ProcessFailed) -> None:
        """Log the failure, wait, and prepare the run directory for another controller."""
        restart = self._decide(failed)
        remove_files(self._run_dir, CONTROLLER_FILES)
        self._wait(failed, restart, "the controller starts again under the running trainer")

    def _decide(self, failed: ProcessFailed) -> Restart:
        self._record(failed)
        decision = decide(self._failures, self._config.restart.max)
        if isinstance(decision, str):
            raise self._end(failed, decision)
        return decision

    def _wait(self, failed: ProcessFailed, restart: Restart, what: str) -> None:
        count = f"restart {restart.number} of {self._config.restart.max} within an hour"
        self._log(f"{failed}\n{what} in {restart.delay_s:g} s ({count}): {failed.what}")
        time.sleep(restart.delay_s)

    def _record(self, failed: ProcessFailed) -> None:
        newest = read_metrics(self._run_dir, newest=1)
        steps = newest[0]["step"] if newest else 0
        is_left = start_version(self._run_dir) < self._config.trainer.steps
        reported = (failed.role.process.poll() or 0) > 0
        failure = Failure(
            at_s=time.monotonic(),
            error=error_identity(failed.role.output()) if reported else None,
            progressed=steps > self.start and is_left,
        )
        self._failures.append(failure)
        if self._cause is None or failure.progressed:
            self._cause = failed

    def _end(self, failed: ProcessFailed, reason: str) -> RoleFailed:
        """Return the error that ends the run. It begins with the cause."""
        later = "" if failed is self._cause else f"\nThe last failure after it: {failed.what}"
        error = RoleFailed(f"{self._cause}{later}\nThe run ends: {reason}")
        self._log(str(error), on_terminal=False)
        return error

    def _log(self, text: str, on_terminal: bool = True) -> None:
        if on_terminal:
            print(text, file=sys.stderr, flush=True)
        append_log(self._run_dir / LOGS_DIR / LOG, text)
