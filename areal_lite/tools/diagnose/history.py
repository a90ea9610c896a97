"""The records of a run that the findings examine, as far as the run got."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_lite.config import TrainConfig, load_config
from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.paths import CONFIG_FILE, LOGS_DIR, STORE_FILE, SUMMARY_FILE
from areal_lite.run_dir.resume import is_locked, stop_requested
from areal_lite.system.processes import tail
from areal_lite.tools.diagnose.limits import limit
from areal_lite.tools.report.run_data import Columns, read_columns

_LOG_LINES = 400
# A server's own log (server-N.log) can be gigabytes.
_LOGS = ("controller", "trainer", "servers.", "restarts.")
_ERROR = re.compile(r" ERROR |^\w*(?:Error|Exception)\b")


class Log(NamedTuple):
    """The last lines of a log, and the wall-clock seconds of its last change."""

    lines: list[str]
    changed_at: float


@dataclass(frozen=True, kw_only=True)
class History:
    """The records of one run. `now` is in wall-clock seconds, like every time in them."""

    run_dir: Path
    config: TrainConfig
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    columns: Columns
    logs: dict[str, Log] = field(default_factory=dict)
    started_at: float
    now: float
    # A running run holds its lock. One that ended has a summary. One that was killed has neither.
    running: bool = False
    stopped: bool = False

    @property
    def complete(self) -> bool:
        """Return whether all steps are trained."""
        return self.step >= self.config.trainer.steps

    @property
    def step(self) -> int:
        """Return the number of trained steps. `metrics` may have only the newest of them."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def takes_turns(self) -> bool:
        """Return whether generation waits for every push, as nothing may start for later steps."""
        return self.config.max_lead < self.config.sync.every

    def values(self, key: str) -> np.ndarray:
        """Return `key` of each step, float64 [steps], NaN where it is unknown."""
        found = [m.get(key) for m in self.metrics]
        return np.array([np.nan if value is None else value for value in found], np.float64)

    def recent(self, key: str) -> np.ndarray:
        """Return the known values of the recent steps; empty if too few are known."""
        known = self.values(key)[-int(limit("recent_steps")) :]
        return _enough(known[np.isfinite(known)])

    def first(self, key: str) -> np.ndarray:
        """Return the known values of the first steps; empty unless the run is twice as long."""
        known = self.values(key)
        least = int(limit("least_steps"))
        return (
            _enough(known[:least][np.isfinite(known[:least])]) if len(known) >= 2 * least else _NO
        )

    def middle(self, key: str) -> np.ndarray:
        """Return the known values without the first step and those in which generation ends."""
        last = 1 + self.config.buffer.max_staleness if self.complete else 0
        known = self.values(key)[1 : len(self.metrics) - last]
        return _enough(known[np.isfinite(known)])

    def share_of_time(self, key: str) -> float | None:
        """Return the seconds of `key` as a share of the steps' time; None with too few steps."""
        seconds, time_s = self.middle(key), self.middle("time_s")
        return float(seconds.sum() / time_s.sum()) if len(seconds) and time_s.sum() else None

    def count(self, key: str) -> int:
        """Return a count that starts at 0 with each process of the controller, over `metrics`."""
        found = self.values(key)
        before = found[:1] if self.step > len(self.metrics) else np.zeros(1)
        known = np.nan_to_num(np.concatenate((before, found)))
        grown = np.diff(known)
        return int(np.where(grown < 0, known[1:], grown).sum())

    def log_lines(self, name: str, text: str) -> list[str]:
        """Return the last lines of a log that contain `text`."""
        return [line for line in self.logs[name].lines if text in line] if name in self.logs else []

    @cached_property
    def errors(self) -> dict[str, str]:
        """Return the last error line of each log of the controller and the trainer ranks."""
        found = {
            name: [line.strip() for line in log.lines if _ERROR.search(line)]
            for name, log in self.logs.items()
            # An older log is that of an earlier start of the run.
            if name.startswith(("controller", "trainer")) and log.changed_at >= self.started_at
        }
        return {name: lines[-1] for name, lines in found.items() if lines}


_NO = np.empty(0)


def _enough(known: np.ndarray) -> np.ndarray:
    return known if len(known) >= limit("least_steps") else _NO


def read_history(run_dir: Path, now: float | None = None, newest: int | None = None) -> History:
    """Read the records of a run, which may have ended, been killed or still be going.

    Args:
        run_dir: the run directory.
        now: wall-clock seconds; None for the present.
        newest: how many of the newest training steps to read; None for all.

    Raises ValueError for a directory that is not that of a training run.
    """
    if not (run_dir / CONFIG_FILE).exists():
        raise ValueError(f"run_dir={run_dir} is not the directory of a training run: give one")
    ended = (run_dir / SUMMARY_FILE).exists()
    return History(
        run_dir=run_dir,
        config=load_config(run_dir),
        metrics=read_metrics(run_dir, newest),
        evals=read_events(run_dir, "evals"),
        columns=read_columns(run_dir / STORE_FILE),
        logs={
            path.name: Log(tail(path, _LOG_LINES).splitlines(), path.stat().st_mtime)
            for path in sorted((run_dir / LOGS_DIR).glob("*.log"))
            if path.name.startswith(_LOGS)
        },
        started_at=(run_dir / CONFIG_FILE).stat().st_mtime,
        now=time.time() if now is None else now,
        running=not ended and is_locked(run_dir),
        stopped=stop_requested(run_dir),
    )
