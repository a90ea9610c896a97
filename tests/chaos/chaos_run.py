"""A real training run whose processes are killed and stopped, in a world that gets worse."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import HEARTBEATS_DIR
from areal_lite.servers.registry import announced_servers
from areal_lite.system import heartbeat
from tests.chaos.schedule import (
    CONTROLLER,
    CUT,
    END,
    FILL,
    JUMP,
    OF_THE_WORLD,
    REPLACED_AFTER_S,
    SERVER,
    SLOW,
    STOP,
    SUPERVISOR,
    TRAINER,
    WORKER,
    Fault,
)
from tests.chaos.world import World

ROOT = Path(__file__).resolve().parents[2]
BOUND = 2
_DISK_FAILS = (
    "No space left on device",
    "disk is full",
    "Read-only file system",
    "disk I/O error",
    "readonly database",
    "unable to open database file",
)
_MODULES = {
    CONTROLLER: "areal_lite.controller.service",
    TRAINER: "areal_lite.trainer.loop",
    WORKER: "areal_lite.rollout.worker",
}
_SETTINGS = [
    "resume=auto",
    "reward.function=tests.integration.toy_reward:share_of_letters",
    "rollout.workflow=tests.chaos.hostile:workflow",
    "rollout.episode_timeout_s=5",
    "rollout.workers=2",
    "rollout.group_size=4",
    "rollout.max_new_tokens=60",
    "rollout.max_concurrent=16",
    "trainer.batch_groups=2",
    "trainer.lr=0.003",
    "trainer.save_every=2",
    f"buffer.max_staleness={BOUND}",
    "eval.problems=4",
    "sync.verify=true",
    "server.count=2",
    "sync.timeout_s=30",
    "restart.max=1000",
    f"restart.hang_timeout_s={60 * REPLACED_AFTER_S}",
]


class ChaosRun:
    """A run of `areal-lite train` on two real servers.

    Args:
        folder: the run directory.
        model: a Hugging Face checkpoint folder.
        steps: training steps.
        transport: that of the weights.
        own: settings in place of those above.
    """

    def __init__(
        self, folder: Path, model: str, steps: int, transport: str, own: Sequence[str] = ()
    ):
        self.folder = folder
        settings = [f"model={model}", f"run_dir={folder}", f"trainer.steps={steps}", *_SETTINGS]
        settings += [f"sync.transport={transport}", *own]
        self._command = [sys.executable, "-m", "areal_lite", "train", "+task=addition", *settings]
        self._output = folder.with_suffix(".output")
        self._seen = 0
        # The sessions of all processes that were seen. Each role and each server has its own.
        self._sessions: set[int] = set()
        self._timers: list[threading.Timer] = []
        self._world = World(folder, folder.parent)
        self._disk_fails = False
        self.start()

    def start(self) -> None:
        """Start the supervisor, for the first time or again."""
        # Whether the disk has failed since then.
        self._disk_failed = self._disk_fails
        with open(self._output, "ab") as output:
            self._printed = output.tell()
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=os.environ | self._world.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def strike(self, fault: Fault) -> float:
        """Wait until it is time for a fault and it has a victim, and let it happen.

        Returns the wall-clock time of the fault.
        """
        while self._newest_step() < fault.step:
            self.pause()
        if fault.kind in OF_THE_WORLD:
            if fault.in_push:
                self._await_push()
            at = time.time()
            self._worsen(fault)
            return at
        while True:
            victim = self._await_victim(fault)
            self._note_sessions()
            if fault.in_push:
                self._await_push()
            if victim.is_running():
                at = time.time()
                self._hit(victim, fault)
                return at

    def _await_victim(self, fault: Fault) -> psutil.Process:
        while (victim := self._find(fault)) is None:
            self.pause()
        return victim

    def _await_push(self) -> None:
        """Wait until the trainer pushes weights, or until the step has ended meanwhile."""
        step = self._newest_step()
        while self._newest_step() == step:
            newest = heartbeat.read(self.folder / HEARTBEATS_DIR / TRAINER)
            if newest and newest[0].startswith("pushing"):
                return
            self.pause(0.005)

    def _hit(self, victim: psutil.Process, fault: Fault) -> None:
        if fault.kind.action == STOP:
            victim.suspend()
            # The next fault does not wait for the end of this one.
            self._later(fault.seconds, _wake, victim)
            return
        is_end = fault.kind.action == END
        victim.send_signal(signal.SIGTERM if is_end else signal.SIGKILL)
        if fault.kind.target == SUPERVISOR:
            status = self._process.wait(60)
            if not (status == 1 and self._disk_failed):
                assert status == (130 if is_end else -signal.SIGKILL), self.output()
            self.start()

    def _worsen(self, fault: Fault) -> None:
        match fault.kind.action:
            case action if action == CUT:
                self._world.cut()
            case action if action == JUMP:
                self._world.jump(round(fault.seconds))
            case action if action == SLOW:
                self._world.slow(True)
                self._later(fault.seconds, self._world.slow, False)
            case action:
                self._fail_writes(errno.ENOSPC if action == FILL else errno.EROFS)
                self._later(fault.seconds, self._fail_writes, 0)

    def _fail_writes(self, error: int) -> None:
        """Let writes fail with this error, or work again (0)."""
        self._disk_fails = error != 0
        self._disk_failed |= self._disk_fails
        self._world.fail_writes(error)

    def _later(self, seconds: float, function: Callable[[Any], None], argument: object) -> None:
        self._timers.append(threading.Timer(seconds, function, [argument]))
        self._timers[-1].start()

    def wait(self, timeout_s: float) -> int:
        """Wait until the run has ended, and return its exit status."""
        for timer in self._timers:
            timer.join()
        self._note_sessions()
        status = self._process.wait(timeout_s)
        if status == 1 and self._disk_failed:
            self._resume_on_a_good_disk()
            status = self._process.wait(timeout_s)
        return status

    def _resume_on_a_good_disk(self) -> None:
        """Start a run again that has ended because its disk failed, when it is well again."""
        ended = self.output()[self._printed :]
        assert self._process.poll() == 1 and any(text in ended for text in _DISK_FAILS), ended
        for timer in self._timers:
            timer.join()
        self.start()

    def close(self) -> None:
        """End the run, if it has not ended."""
        for timer in self._timers:
            timer.cancel()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._world.close()

    def processes(self) -> list[str]:
        """List the command lines of the run's processes that are left."""
        left = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) in self._sessions:
                    if process.status() != psutil.STATUS_ZOMBIE:
                        left.append(" ".join(process.cmdline()))
        return left

    def lines(self, kind: str) -> list[dict]:
        """Read metrics.jsonl or evals.jsonl."""
        text = (self.folder / f"{kind}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def output(self) -> str:
        """Return what the supervisors printed."""
        return self._output.read_text()

    def _newest_step(self) -> int:
        newest = read_metrics(self.folder, newest=1)
        step = newest[0]["step"] if newest else 0
        if step != self._seen:
            self._seen = step
            self._note_sessions()
        return step

    def pause(self, seconds: float = 0.05) -> None:
        """Wait before the next look at the run, which ends only if its disk fails."""
        if self._process.poll() is not None:
            assert self._disk_failed, self.output()
            self._resume_on_a_good_disk()
        time.sleep(seconds)

    def _family(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self._process.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        return []

    def _note_sessions(self) -> None:
        for process in self._family():
            with suppress(ProcessLookupError):
                self._sessions.add(os.getsid(process.pid))

    def _find(self, fault: Fault) -> psutil.Process | None:
        """Return the process that a fault happens to; None while there is none."""
        target = fault.kind.target
        with suppress(psutil.NoSuchProcess):
            if target == SUPERVISOR:
                family = self._family()
                # Before it starts a process, it may not have its handler of SIGTERM yet.
                return family[0] if len(family) > 1 else None
            if module := _MODULES.get(target):
                found = [one for one in self._family() if module in one.cmdline()]
                if target == WORKER:  # the last of a template, a keeper and the worker itself
                    found = [one for one in found if not one.children()]
                return found[0] if found else None
            # A server that was never announced may not die: that would be a wrong setting.
            servers = announced_servers(self.folder)
            if not servers:
                return None
            server = psutil.Process(servers[fault.server % len(servers)].pid)
            if target == SERVER:
                return server
            parts = [one for one in server.children(recursive=True) if target in one.name()]
            return parts[0] if parts else None
        return None


def _wake(process: psutil.Process) -> None:
    """Let a stopped process continue, unless it was replaced meanwhile."""
    with suppress(psutil.NoSuchProcess):
        process.resume()
