"""`areal-lite train` on one machine: the supervisor of a run.

It starts servers, controller and trainer ranks at once (on a shared GPU the server first), watches
them, and ends them all: however the run ends, no process is left. What fails or hangs is started
again, a limited number of times (docs/operations.md, When a process dies or hangs); the servers
(server_pool.py) keep running.

The ranks of a trainer wait for each other, so they hang when the newest heartbeat of all
(system/heartbeat.py) is too old. The oldest one most likely names the cause.
"""

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from areal_lite.config import TrainConfig, reference_folders, save_config
from areal_lite.data.model_folder import check_model_folder, check_numbers
from areal_lite.extensions import DEBUG_MODES, OBSERVERS, load
from areal_lite.launch.roles import (
    Placement,
    ProcessFailed,
    Role,
    RoleFailed,
    Roles,
    RunMoved,
    place_run,
    signal_group,
    stopped_by_hand,
)
from areal_lite.launch.server_pool import ServerPool, train_pool
from areal_lite.run_dir import resume
from areal_lite.run_dir.metrics import EventFollower, forget_after, read_metrics
from areal_lite.run_dir.paths import LOGS_DIR, PROFILE_DIR, SUMMARY_FILE
from areal_lite.system import heartbeat
from areal_lite.system.files import append_log, write_json
from areal_lite.system.processes import back_off_s
from areal_lite.trainer.profile import profiled_steps

CONTROLLER = "areal_lite.controller.service"
RESTARTS_LOG = "restarts.log"
_WINDOW_S = 3600.0  # failures older than this do not count
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_STOPPED_SHARE = 1 / 60  # a stopped process is replaced after this share of restart.hang_timeout_s
# After a longer pause between two checks, this process itself was stopped, or the machine was.
_LONGEST_PAUSE_S = 5.0
_STACK_TIMEOUT_S = 3.0
_POLL_INTERVAL_S = 0.05
_STOPPING = "the run finishes its step, saves a checkpoint and stops; Ctrl-C ends it at once"
OnStep = Callable[[dict[str, Any]], object]
"""Called with each line of metrics.jsonl, soon after its training step."""


class Observer:
    """Show a run to a person: print a line for each step, and write no report.

    The entry `console` of `areal_lite.observers` has the same methods, and shows more.
    """

    @contextmanager
    def watch(self, config: TrainConfig, run_dir: Path) -> Iterator[Callable[[], None]]:
        """Show training until the context ends. What it yields is called several times a second."""

        def show(step: dict[str, Any]) -> None:
            reward = step["reward_mean"]
            text = "" if reward is None else f" · reward {reward:.3g}"
            print(f"step {step['step']}/{config.trainer.steps}{text}", file=sys.stderr)

        yield (poll := _step_reporter(run_dir, show))
        poll()

    def summarize(
        self, config: TrainConfig, run_dir: Path, started_at: float, finished_at: float
    ) -> dict[str, Any]:
        """Return the content of summary.json. Times are wall-clock seconds."""
        metrics = read_metrics(run_dir)
        return {
            "run_dir": str(run_dir),
            "steps": len(metrics),
            "steps_planned": config.trainer.steps,
            "wall_s": finished_at - started_at,
            "reward_first": metrics[0]["reward_mean"] if metrics else None,
            "reward_last": metrics[-1]["reward_mean"] if metrics else None,
        }

    def report(self, run_dir: Path, summary: dict[str, Any]) -> None:
        """Write the report of a run, and print its summary to stderr."""
        print(f"run directory: {run_dir}", file=sys.stderr)


def observer() -> Observer:
    return load(OBSERVERS, "console") or Observer()


def run(config: TrainConfig) -> int:
    """Train, write summary.json and report.png, and print the summary.

    The last line on stdout is the path of summary.json. Returns the exit status: STOPPED (75) when
    the run was asked to stop before its last step. Raises ValueError when another process runs in
    the same directory, and RuntimeError or TimeoutError when a role fails.
    """
    with resume.lock_run_dir(Path(config.run_dir)):
        return run_locked(config)


def run_locked(config: TrainConfig) -> int:
    """Train as `run` does, while the caller holds the lock of the run directory."""
    stopped = train_and_report(config)
    print(Path(config.run_dir) / SUMMARY_FILE)
    return resume.STOPPED if stopped else 0


def train_and_report(config: TrainConfig, on_step: OnStep | None = None) -> bool:
    """Train as `run` does; return whether the run was asked to stop before its last step.

    The caller holds the lock of the run directory. Raises RuntimeError or TimeoutError when a role
    fails. A run that fails or is interrupted leaves a summary of its steps, too.
    """
    run_dir = Path(config.run_dir)
    print(f"run directory: {run_dir}", file=sys.stderr)
    resume.set_aside_damaged(run_dir)
    if (step := resume.start_version(run_dir)) >= config.trainer.steps:
        complete = f"the run is complete: it has a checkpoint of step {step}"
        print(f"{complete}, and trainer.steps={config.trainer.steps}", file=sys.stderr)
        resume.clear_stop_request(run_dir)
        if not (run_dir / SUMMARY_FILE).exists():
            finish(config, run_dir, time.time())
        return False
    for model in filter(None, {config.model, *reference_folders(config).values()}):
        check_model_folder(Path(model))
        check_numbers(Path(model))
    started_at = time.time()
    try:
        train(config, run_dir, on_step)
    except (RuntimeError, TimeoutError, KeyboardInterrupt) as error:
        if isinstance(error, RunMoved):
            run_dir = error.place
            config = replace(config, run_dir=str(run_dir))
        with suppress(OSError, ValueError):  # a full disk or bad store must not hide the reason
            if read_metrics(run_dir):
                finish(config, run_dir, started_at)
        print(how_to_continue(config), file=sys.stderr)
        raise
    finish(config, run_dir, started_at)
    if stopped := resume.stop_requested(run_dir):
        step = resume.start_version(run_dir)
        print(f"stopped as requested after step {step}: resume=auto continues", file=sys.stderr)
    return stopped


def how_to_continue(config: TrainConfig) -> str:
    """Say from which step a run that ended early can continue, and how."""
    if step := resume.start_version(Path(config.run_dir)):
        return (
            f"the run ended early: the same command with run_dir={config.run_dir} resume=auto "
            f"continues from step {step}"
        )
    return (
        "the run ended early, without a checkpoint to continue from: trainer.save_every=N writes "
        f"one every N steps (it is {config.trainer.save_every}; 0 is one every half hour)"
    )


def train(config: TrainConfig, run_dir: Path, on_step: OnStep | None = None) -> None:
    """Run all roles until trainer and controller have ended. Raises RoleFailed when one fails."""
    resume.remove_files(run_dir)
    placement = place_run(config)
    if config.debug != "off":
        half = load(DEBUG_MODES, config.debug_mode)
        return half.run(config, run_dir, placement, _step_reporter(run_dir, on_step))
    save_config(config, run_dir)
    if steps := profiled_steps():
        print(f"steps {steps} are profiled: {run_dir / PROFILE_DIR}", file=sys.stderr)
    restarts = Restarts(config, run_dir)
    if restarts.start:
        print(f"the run resumes from step {restarts.start}", file=sys.stderr)
    servers = dict(enumerate(placement.servers))
    with stopped_by_hand(run_dir), train_pool(config, run_dir, servers, True) as pool:
        while True:
            forget_after(run_dir, restarts.start)
            try:
                return _run_roles(config, run_dir, placement, pool, restarts, on_step)
            except ProcessFailed as failed:
                restarts.prepare(failed)


def _run_roles(
    config: TrainConfig,
    run_dir: Path,
    placement: Placement,
    pool: ServerPool,
    restarts: "Restarts",
    on_step: OnStep | None,
) -> None:
    """Run controller and trainer ranks until they end. Raises ProcessFailed or RoleFailed."""
    steps = config.trainer.steps
    report_steps = _step_reporter(run_dir, on_step)
    with Roles(run_dir) as roles, observer().watch(config, run_dir) as show:
        controller = roles.start_module("controller", CONTROLLER)
        watchdog = Watchdog(roles, config.restart.hang_timeout_s)

        def watch_start() -> None:
            show()
            roles.check()
            watchdog.check()

        if placement.shared:  # SGLang sizes its KV cache by the memory that it finds free
            pool.wait_ready(watch_start)
        ranks = roles.start_ranks("areal_lite.trainer.loop", config.trainer, placement.trainer)
        told = False

        def watch() -> None:
            nonlocal told
            if not told and resume.stop_requested(run_dir):
                told = True
                print(_STOPPING, file=sys.stderr)
            show()
            report_steps()
            check_servers(pool, run_dir, steps)
            watchdog.check()

        pool.wait_ready(watch_start)
        while True:
            try:
                return roles.wait([*ranks, controller], watch=watch)
            except ProcessFailed as failed:
                report_steps()  # a new start reports none of this one
                controller = restarts.replace_controller(failed, roles)


def _step_reporter(run_dir: Path, on_step: OnStep | None) -> Callable[[], None]:
    """Return a function that passes the training steps since its last call to `on_step`."""
    steps = EventFollower(run_dir, "metrics")
    steps.read()  # of an earlier start

    def report() -> None:
        if on_step:
            for step in steps.read():
                on_step(step)

    return report


def check_servers(pool: ServerPool, run_dir: Path, steps: int) -> None:
    """Raise RoleFailed when no server is left, unless the trainer only has to save its weights."""
    try:
        pool.check()
    except RoleFailed:
        if len(read_metrics(run_dir)) < steps:
            raise


def finish(config: TrainConfig, run_dir: Path, started_at: float) -> None:
    """Write summary.json and the report, and print it. `started_at` is in wall-clock seconds."""
    summary = observer().summarize(config, run_dir, started_at, time.time())
    write_json(run_dir / SUMMARY_FILE, summary)
    observer().report(run_dir, summary)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a process, and with it of all processes of controller and trainer."""

    at_s: float  # when it was noticed, in seconds of any clock
    group: str  # controller or trainer
    error: str | None = None  # identifies the error that it reported; None: it was killed or hung
    progressed: bool = False  # it completed a training step, and steps are left


Restart = tuple[float, int]
"""The wait in seconds before a restart, and its number within an hour, from 1."""


def decide(failures: list[Failure], most: int) -> Restart | str:
    """Return the restart after the last of all `failures` of this run, or why the run ends.

    The wait before a restart grows with failures of one kind without progress between them.
    `most`: `restart.max`.
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
    in_vain = takewhile(lambda one: not one.progressed, reversed(recent))
    alike = sum((one.group, one.error) == (last.group, last.error) for one in in_vain)
    return back_off_s(alike), len(recent)


def error_identity(log: str) -> str:
    """Return the place and the message of an error, which are equal for two reports of it.

    `log` ends with the report. Numbers in the message may differ, such as that of a step.
    """
    frames = list(_FRAME.finditer(log))
    place = f"{frames[-1]['file']}:{frames[-1]['line']} " if frames else ""
    lines = [line for line in log.splitlines() if line.strip()]
    return place + re.sub(r"\d+", "#", lines[-1] if lines else "")


def find_hang(roles: list[Role], now: float, timeout_s: float) -> tuple[Role, str] | None:
    """Return the process that hangs at the time `now` in seconds, and how; None without one."""
    for role in roles:
        stopped_s = 0.0 if role.stopped_at is None else now - role.stopped_at
        if stopped_s >= timeout_s * _STOPPED_SHARE:
            return role, (
                f"has been stopped by a signal (SIGSTOP) for {stopped_s:.0f} s, so that it cannot "
                "print its stack"
            )
    for group in {role.group for role in roles}:
        members = [role for role in roles if role.group == group]
        if now - max(role.beat_at for role in members) >= timeout_s:
            oldest = min(members, key=lambda role: role.beat_at)
            return oldest, f"gave no heartbeat for {now - oldest.beat_at:.0f} s"
    return None


class Watchdog:
    """Watches controller and trainer ranks. `timeout_s` is `restart.hang_timeout_s`."""

    def __init__(self, roles: Roles, timeout_s: float):
        self._roles = roles
        self._timeout_s = timeout_s
        self._checked_at = time.monotonic()

    def check(self) -> None:
        """Kill the process that hangs, and raise ProcessFailed. Its group logs stacks before."""
        now = time.monotonic()
        running = [role for role in self._roles.roles if role.process.poll() is None]
        for role in running:
            if now - self._checked_at > _LONGEST_PAUSE_S:
                role.beat_at, role.stopped_at = now, None  # no heartbeat could be given or noticed
            _update(role, now)
        self._checked_at = now
        if hang := find_hang(running, now, self._timeout_s):
            role, how = hang
            group = [one for one in running if one.group == role.group]
            log_stacks([one for one in group if one.stopped_at is None])
            signal_group(role.process, signal.SIGKILL)
            raise ProcessFailed(role, f"{role.name} hangs: it {how}; its phase: {role.phase}")


def _update(role: Role, now: float) -> None:
    if newest := heartbeat.read(role.heartbeat):
        role.phase, beat_ns = newest
        if beat_ns != role.beat_ns:
            role.beat_ns, role.beat_at = beat_ns, now
    stopped = False
    with suppress(psutil.NoSuchProcess):
        stopped = psutil.Process(role.process.pid).status() == psutil.STATUS_STOPPED
    role.stopped_at = (role.stopped_at or now) if stopped else None


def log_stacks(roles: list[Role]) -> None:
    """Let processes print their Python stacks to their logs, and wait until they have."""
    logs = [role.log for role in roles]
    first = sizes = [log.stat().st_size for log in logs]
    for role in roles:
        role.process.send_signal(heartbeat.STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        before, sizes = sizes, [log.stat().st_size for log in logs]
        if sizes == before and all(size > start for size, start in zip(sizes, first)):
            return


class Restarts:
    """Decides after each failure, and prepares the next start, which continues from `start`."""

    def __init__(self, config: TrainConfig, run_dir: Path):
        self._config = config
        self._run_dir = run_dir
        self._log = run_dir / LOGS_DIR / RESTARTS_LOG
        self._failures: list[Failure] = []
        # The failure to show first if the run ends: the first one of those without progress.
        self._cause: ProcessFailed | None = None
        self.start = resume.start_version(run_dir)

    def prepare(self, failed: ProcessFailed) -> None:
        """Log the failure, wait, prepare the next start. Raises RoleFailed if the run must end."""
        if resume.stop_requested(self._run_dir):
            self._record(failed)
            raise self._end(failed, "the run was asked to stop")
        restart = self._decide(failed)
        try:
            resume.set_aside_damaged(self._run_dir)
        except ValueError as error:
            raise self._end(failed, str(error)) from error
        resume.remove_files(self._run_dir, resume.ROLE_FILES)
        self.start = resume.start_version(self._run_dir)
        self._wait(failed, restart, f"controller and trainer start again from step {self.start}")

    def replace_controller(self, failed: ProcessFailed, roles: Roles) -> Role:
        """Log the failure, wait, and start another controller under the running trainer.

        Raises `failed` if that cannot help. A controller that reports an error has told the ranks,
        which end, too. The batches of a replay buffer are not recorded before the end of their
        step.
        """
        reported = (failed.role.process.poll() or 0) > 0
        replays = self._config.buffer.replay.capacity > 0
        if failed.role.name != "controller" or reported or replays:
            raise failed
        roles.forget(failed.role)
        restart = self._decide(failed)
        resume.remove_files(self._run_dir, resume.CONTROLLER_FILES)
        self._wait(failed, restart, "the controller starts again under the running trainer")
        return roles.start_module("controller", CONTROLLER)

    def _decide(self, failed: ProcessFailed) -> Restart:
        self._record(failed)
        if isinstance(decision := decide(self._failures, self._config.restart.max), str):
            raise self._end(failed, decision)
        return decision

    def _wait(self, failed: ProcessFailed, restart: Restart, what: str) -> None:
        delay_s, number = restart
        count = f"restart {number} of {self._config.restart.max} within an hour"
        text = f"{failed}\n{what} in {delay_s:g} s ({count}): {failed.what}"
        print(text, file=sys.stderr, flush=True)
        append_log(self._log, text)
        time.sleep(delay_s)

    def _record(self, failed: ProcessFailed) -> None:
        newest = read_metrics(self._run_dir, newest=1)
        steps = newest[0]["step"] if newest else 0
        is_left = resume.start_version(self._run_dir) < self._config.trainer.steps
        role = failed.role
        reported = (role.process.poll() or 0) > 0
        failure = Failure(
            at_s=time.monotonic(),
            group=role.group,
            error=error_identity(role.output()) if reported else None,
            progressed=steps > self.start and is_left,
        )
        self._failures.append(failure)
        if self._cause is None or failure.progressed:
            self._cause = failed

    def _end(self, failed: ProcessFailed, reason: str) -> RoleFailed:
        """Return the error that ends the run. It begins with the cause."""
        later = "" if failed is self._cause else f"\nThe last failure after it: {failed.what}"
        error = RoleFailed(f"{self._cause}{later}\nThe run ends: {reason}")
        append_log(self._log, str(error))
        return error
