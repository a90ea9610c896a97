"""A training run as its panel shows it, read from what its processes write to its directory.

`CONSOLE` is the observer of `areal-lite train` (launch/local.py).
"""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_lite.config import TrainConfig
from areal_lite.run_dir.controller_status import read_status
from areal_lite.run_dir.metrics import EventFollower
from areal_lite.system.processes import start_daemon
from areal_lite.tools.diagnose.diagnosis import alarm_line, diagnose, missing_signal
from areal_lite.tools.diagnose.history import Finding, History, read_history
from areal_lite.tools.report import panel
from areal_lite.tools.report.summary import build_summary, known_values, summary_table

# A look reads so many of the newest steps, of 8 kB each in memory. It may take this share of one
# core, and is not repeated before so many seconds.
_DIAGNOSED_STEPS = 1000
_LOOK_SHARE = 0.05
_LOOK_INTERVAL_S = 10.0
_SHOWN_FINDINGS = 2
_SHOWN_WARNINGS = 2
# Warnings of libraries are about their own settings.
_WARNING = re.compile(
    r"(?P<at>\S+ [\d:]+)\S* (?P<level>WARNING|ERROR) (?:areal_lite|__main__)\S*: (?P<text>.*)"
)
_ROLES = ("controller", "trainer")


class RunWatch:
    """Follows the files of a run."""

    def __init__(self, config: TrainConfig, run_dir: Path):
        """Begin before the processes of the run start."""
        self._run_dir = run_dir
        self._metrics = EventFollower(run_dir, "metrics")
        self._evals = EventFollower(run_dir, "evals")
        self._notices = _Notices(run_dir)
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
            notices=self._notices.read(now),
        )
        return panel.train_view(self._state)

    def _add(self, steps: list[dict[str, Any]], **changes: Any) -> None:
        """Add steps to the state of the run, and change other parts of it."""
        recent = [*self._state.steps, *steps][-panel.RECENT_STEPS :]
        rewards = [*self._state.rewards, *known_values(steps, "reward_mean")]
        self._state = replace(self._state, steps=recent, rewards=rewards, **changes)


class _Notices:
    """The newest findings and warnings. A thread looks for them, again and again."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._newest: list[panel.Notice] = []
        self._look: Future[list[panel.Notice]] | None = None
        self._started_at = 0.0
        self._due_at = 0.0

    def read(self, now: float) -> list[panel.Notice]:
        """Return the notices of the newest look, and start the next one if it is due."""
        if self._look is None:
            if now >= self._due_at:
                self._started_at = now
                self._look = start_daemon(_notices_of, self._run_dir)
        elif self._look.done():
            self._due_at = now + max(_LOOK_INTERVAL_S, (now - self._started_at) / _LOOK_SHARE)
            # Files that a run is about to write may be incomplete: the next look may do better.
            if self._look.exception() is None:
                self._newest = self._look.result()
            self._look = None
        return self._newest


def _notices_of(run_dir: Path) -> list[panel.Notice]:
    history = read_history(run_dir, newest=_DIAGNOSED_STEPS)
    return [*finding_notices(diagnose(history), run_dir), *warning_notices(history)]


def finding_notices(findings: list[Finding], run_dir: Path) -> list[panel.Notice]:
    """Return the most important findings, and the command that says what to do."""
    if not findings:
        return []
    shown = [panel.Notice(found.severity, found.title) for found in findings[:_SHOWN_FINDINGS]]
    return [*shown, panel.Notice("remedy", f"areal-lite diagnose {run_dir}")]


def warning_notices(run: History) -> list[panel.Notice]:
    """Return the newest warnings and errors of this start of controller and trainer."""
    since = time.strftime("%F %T", time.localtime(run.started_at))
    found = [
        (warning["at"], warning["level"].lower(), f"{Path(name).stem}: {warning['text']}")
        for name, log in run.logs.items()
        for line in log.lines
        if name.startswith(_ROLES) and (warning := _WARNING.match(line)) and warning["at"] >= since
    ]
    newest = reversed(sorted(found, key=itemgetter(0))[-_SHOWN_WARNINGS:])
    return [panel.Notice(level, f"{at.split()[1]} {text}") for at, level, text in newest]


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

        console = Console(stderr=True, markup=False, emoji=False)  # a path may look like both
        console.print(summary_table(summary))
        paths = f"run directory: {run_dir}\nreport: {write_report(run_dir)}, {write_page(run_dir)}"
        console.print(paths, highlight=False, soft_wrap=True)
        if line := alarm_line(run_dir):
            console.print(line, highlight=False, soft_wrap=True)


CONSOLE = ConsoleObserver()
