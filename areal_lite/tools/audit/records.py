"""The records of a run as the audit reads them: files first, then the store, so that the store is
never behind what the files say of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, STORE_FILE, SUMMARY_FILE, TOTALS_FILE
from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.resume import checkpoint_steps, is_locked
from areal_lite.system.files import read_json
from areal_lite.tools.audit.settings import Settings, settings_of_starts


@dataclass(frozen=True, kw_only=True)
class Records:
    """The contents of a run directory.

    Args:
        run_dir: the run directory.
        running: a command or a controller works there.
        starts: the settings of each start of the run, the newest last.
        checkpoints: the steps of the complete checkpoints.
        metrics, evals: the lines of metrics.jsonl and evals.jsonl.
        totals, summary: controller_totals.json and summary.json; empty without them.
        store: the store, of which every query sees the same moment; None without one.
    """

    run_dir: Path
    running: bool
    starts: list[Settings]
    checkpoints: list[int]
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    totals: dict[str, Any]
    summary: dict[str, Any]
    store: RunReader | None

    @property
    def config(self) -> Settings:
        """Return the settings of the newest start."""
        return self.starts[-1]

    @property
    def replays(self) -> bool:
        """Return whether batches are drawn from a replay buffer."""
        return bool(self.config.replay_capacity)

    @property
    def resumes_from(self) -> int:
        """Return the step from which the run would continue."""
        return max(self.checkpoints, default=0)


@contextmanager
def open_records(run_dir: Path) -> Iterator[Records]:
    """Read the records of a run that ended, was killed or is still going.

    Raises ValueError for a directory that is not that of a training run.
    """
    files = {
        "run_dir": run_dir,
        "running": is_locked(run_dir),
        "starts": settings_of_starts(run_dir),
        "totals": read_json(run_dir / TOTALS_FILE),
        "summary": read_json(run_dir / SUMMARY_FILE),
        "checkpoints": checkpoint_steps(run_dir / CHECKPOINTS_DIR),
        "evals": read_events(run_dir, "evals"),
        "metrics": read_metrics(run_dir),
    }
    path = run_dir / STORE_FILE
    if not path.exists():
        yield Records(**files, store=None)
        return
    with closing(RunReader(path)) as reader:
        reader.snapshot()
        yield Records(**files, store=reader)
