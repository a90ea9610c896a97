"""A training run as its panel shows it, read from what its processes write to its directory.

`CONSOLE` is the observer of `areal-lite train` (launch/local.py).
"""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_lite.config import TrainConfig
from areal_lite.run_dir.controller_status import read_status
from areal_lite.run_dir.metrics import EventFollower
from areal_lite.run_dir.paths import LOGS_DIR
from areal_lite.system.processes import start_daemon
from areal_lite.tools.diagnose.diagnosis import alarm_line, diagnose, missing_signal
from areal_lite.tools.diagnose.history import Finding, read_history
from areal_lite.tools.report import panel
from areal_lite.tools.report.summary import build_summary, known_values, summary_table

# A diagnosis reads so many of the newest steps, of 8 kB each in memory. It may take this share of
# one core, and is not repeated before so many seconds.
_DIAGNOSED_STEPS = 1000
_DIAGNOSIS_SHARE = 0.05
_DIAGNOSIS_INTERVAL_S = 10.0
_SHOWN_FINDINGS = 2
_SHOWN_WARNINGS = 2
# Warnings of libraries are about their own settings.
_WARNING = re.compile(
    r"\S+ (?P<time>[\d:]+)\S* (?P<level>WARNING|ERROR) (?:areal_lite|__main__)\S*: (?P<text>.*)"
)
_ROLES = ("controller", "trainer")
# The newest bytes of a log are read, even if it grows faster.
_LOG_BYTES = 65536


class RunWatch:
    """Follows the files of a run."""

    def __init__(self, config: TrainConfig, run_dir: Path):
        """Begin before the processes of the run start."""
        self._run_dir = run_dir
        self._metrics = EventFollower(run_dir, "metrics")
        self._evals = EventFollower(run_dir, "evals")
        self._warnings = _Warnings(run_dir / LOGS_DIR)
        self._findings = _Findings(run_dir)
        self._step_at: float | None = None  # of the newest step of this start
        self._state = panel.RunState(config=config)
        self._add(self._metrics.read())  # by another start of the run

    def view(self) -> panel.View:
        """Return the present content of the panel."""
        now, steps = time.monotonic(), self._metrics.read()
        self._step_at = now if steps else self._step_at
        self._add(
            steps,
            evaluation=(self._evals.read() or [self._state.evaluation])[-1],
            status=read_status(self._run_dir),
            since_step_s=now - self._step_at if self._step_at else 0.0,
            notices=[*self._findings.read(now), *self._warnings.read()],
        )
        return panel.train_view(self._state)

    def _add(self, steps: list[dict[str, Any]], **changes: Any) -> None:
        """Add steps to the state of the run, and change other parts of it."""
        recent = [*self._state.steps, *steps][-panel.RECENT_STEPS :]
        rewards = [*self._state.rewards, *known_values(steps, "reward_mean")]
        self._state = replace(self._state, steps=recent, rewards=rewards, **changes)


class _Findings:
    """The newest findings about a run. A thread looks for them, again and again."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._notices: list[panel.Notice] = []
        self._diagnosis: Future[list[Finding]] | None = None
        self._started_at = 0.0
        self._due_at = 0.0

    def read(self, now: float) -> list[panel.Notice]:
        """Return the notices of the newest diagnosis, and start the next one if it is due."""
        if self._diagnosis is None:
            if now >= self._due_at:
                self._started_at = now
                history = partial(read_history, self._run_dir, newest=_DIAGNOSED_STEPS)
                self._diagnosis = start_daemon(lambda: diagnose(history()))
        elif self._diagnosis.done():
            cost_s = now - self._started_at
            self._due_at = now + max(_DIAGNOSIS_INTERVAL_S, cost_s / _DIAGNOSIS_SHARE)
            # Files that a run is about to write may be incomplete: the next look may do better.
            if self._diagnosis.exception() is None:
                self._notices = finding_notices(self._diagnosis.result(), self._run_dir)
            self._diagnosis = None
        return self._notices


def finding_notices(findings: list[Finding], run_dir: Path) -> list[panel.Notice]:
    """Return the most important findings, and the command that says what to do."""
    if not findings:
        return []
    shown = [
        panel.Notice(finding.severity, finding.title) for finding in findings[:_SHOWN_FINDINGS]
    ]
    return [*shown, panel.Notice("remedy", f"areal-lite diagnose {run_dir}")]


class _Warnings:
    """The newest warnings and errors in the logs of controller and trainer."""

    def __init__(self, logs: Path):
        """Leave out what an earlier start has logged."""
        self._logs = logs
        self._read = {path: path.stat().st_size for path in self._paths()}
        self._notices: deque[panel.Notice] = deque(maxlen=_SHOWN_WARNINGS)

    def read(self) -> list[panel.Notice]:
        """Return the newest warnings, the newest first."""
        for path in self._paths():
            for line in self._new_lines(path):
                if found := _WARNING.match(line):
                    text = f"{found['time']} {path.stem}: {found['text']}"
                    self._notices.appendleft(panel.Notice(found["level"].lower(), text))
        return list(self._notices)

    def _paths(self) -> list[Path]:
        return sorted(path for role in _ROLES for path in self._logs.glob(f"{role}*.log"))

    def _new_lines(self, path: Path) -> list[str]:
        with open(path, "rb") as log:
            start = max(self._read.get(path, 0), log.seek(0, os.SEEK_END) - _LOG_BYTES)
            log.seek(start)
            complete = log.read().rpartition(b"\n")[0]
        self._read[path] = start + len(complete)
        return complete.decode(errors="replace").splitlines()


class ConsoleObserver:
    """The panel during a run; report.png, report.html and a table at its end."""

    @contextmanager
    def watch(self, config: TrainConfig, run_dir: Path) -> Iterator[Callable[[], None]]:
        with panel.Progress(RunWatch(config, run_dir).view) as progress:
            yield progress.poll

    def summarize(
        self, config: TrainConfig, run_dir: Path, started_at: float, finished_at: float
    ) -> dict[str, Any]:
        summary = build_summary(run_dir, config, started_at, finished_at)
        return summary | {"no_signal": missing_signal(run_dir)}

    def report(self, run_dir: Path, summary: dict[str, Any]) -> None:
        from areal_lite.tools.report.figure import write_report  # matplotlib is slow to import
        from areal_lite.tools.report.page import write_page

        console = Console(stderr=True)
        console.print(summary_table(summary))
        paths = f"run directory: {run_dir}\nreport: {write_report(run_dir)}, {write_page(run_dir)}"
        console.print(paths, highlight=False, soft_wrap=True)
        if line := alarm_line(run_dir):
            console.print(line, highlight=False, soft_wrap=True)


CONSOLE = ConsoleObserver()
