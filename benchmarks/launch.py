"""Runs of `areal-lite` for benchmarks: each a process of this checkout."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


ROLES = {
    "areal_lite.trainer.loop": "trainer",
    "areal_lite.controller.service": "controller",
    "areal_lite.launch.serve": "server: HTTP",
    "sglang::scheduler": "server: scheduler",
    "areal_lite.rewards": "rewards",
}
"""A part of a process's command line, and its role. All other processes are `others`."""

_EVERY_S = 0.5


@dataclass
class RoleTimes:
    """Samples of (wall-clock time, CPU seconds by role since the start)."""

    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def follow(self, run: subprocess.Popen) -> None:
        """Sample until the run ends."""
        seconds: dict[int, tuple[str, float]] = {}
        while run.poll() is None:
            seconds.update(_processes(run.pid))
            totals: dict[str, float] = {}
            for role, spent in seconds.values():
                totals[role] = totals.get(role, 0.0) + spent
            self.samples.append((time.time(), totals))
            time.sleep(_EVERY_S)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Return the CPU seconds of each role between two wall-clock times."""
        before = min(self.samples, key=lambda sample: abs(sample[0] - begin))[1]
        after = min(self.samples, key=lambda sample: abs(sample[0] - end))[1]
        return {role: spent - before.get(role, 0.0) for role, spent in after.items()}


def _processes(pid: int) -> Iterator[tuple[int, tuple[str, float]]]:
    """Yield (pid, (role, CPU seconds)) of a process and of all that it started."""
    try:
        root = psutil.Process(pid)
        found = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in found:
        try:
            words, spent = " ".join(process.cmdline()), process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        role = next((role for part, role in ROLES.items() if part in words), "others")
        yield process.pid, (role, spent.user + spent.system)


def areal_lite(log: Path, *arguments: str, **variables: str) -> RoleTimes:
    """Run `areal-lite` with its output in `log`, and with these environment variables.

    It chooses its own number of threads unless `OMP_NUM_THREADS` is one of them.

    Returns the processor time of its roles. Raises CalledProcessError if it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "areal_lite", *arguments]
    times = RoleTimes()
    with open(log, "w") as file:
        with subprocess.Popen(command, env=environment, stdout=file, stderr=file) as run:
            try:
                times.follow(run)
            except BaseException:
                run.terminate()
                raise
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    return times


def warm_up(work: Path, seed: int, model: list[str], settings: list[str]) -> Path:
    """Return <work>/warm-<seed>, a model after `sft` with these settings. Make it if needed."""
    cold, warm = work / f"cold-{seed}", work / f"warm-{seed}"
    if not warm.exists():
        own = [
            f"model={cold}",
            f"out={warm}",
            f"run_dir={work / f'sft-{seed}'}",
            f"seed={seed}",
        ]
        make_model(cold, seed, *model)
        stage("sft", work / f"warm-{seed}.log", *own, *settings)
    return warm


def make_model(folder: Path, seed: int, *settings: str) -> None:
    """Make a small random model, unless it is there."""
    if not folder.exists():
        log = folder.with_suffix(".log")
        stage("make_model", log, f"out={folder}", f"seed={seed}", *settings)


def stage(name: str, log: Path, *settings: str) -> None:
    """Run a stage of the quickstart. Raises CalledProcessError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", f"areal_lite_quickstart.{name}", *settings]
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=True)
