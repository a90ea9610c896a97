"""The records of a run as the audit reads them, and the result of one check of them.

The files are read first, then the store, so that the store is never behind what the files say of
it. Settings are read without their schema, which takes much longer: a run may have many starts.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from areal_lite.config.files import CONFIG_FILE, stored_settings
from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, STORE_FILE, SUMMARY_FILE, TOTALS_FILE
from areal_lite.run_dir.resume import checkpoint_steps, is_locked
from areal_lite.system.files import read_json
from areal_lite.tools.store_columns import ColumnReader, open_columns

Settings = dict[str, Any]
"""The settings of one start that the audit needs, by their keys."""

_KEYS = ("trainer.batch_groups", "buffer.max_staleness", "buffer.window")
_KEYS += ("buffer.replay.capacity", "rollout.retire_above", "rollout.rest_unsolved", "sync.every")
_KEYS += ("eval.problems", "eval.every", "seed", "data.sources")
# Ids that a line names, at most.
_SHOWN = 10


def settings_of_starts(run_dir: Path) -> list[Settings]:
    """Read the settings of each start of a run, the newest last.

    Raises ValueError for a directory without a training run.
    """
    earlier = len(list(run_dir.glob("config-*.yaml")))
    starts = []
    for name in (*(f"config-{number}.yaml" for number in range(1, earlier + 1)), CONFIG_FILE):
        stored = stored_settings(run_dir, name)
        try:
            starts.append({key: reduce(getitem, key.split("."), stored) for key in _KEYS})
        except (KeyError, TypeError) as error:
            file = run_dir / name
            raise ValueError(f"{file}: no training run wrote it, it lacks {error}") from error
    return starts


@dataclass(frozen=True, kw_only=True)
class Records:
    """The contents of a run directory."""

    run_dir: Path
    running: bool  # a command or a controller works there
    starts: list[Settings]  # the settings of each start of the run, the newest last
    checkpoints: list[int]  # the steps of the complete checkpoints
    # metrics, evals: the lines of metrics.jsonl and evals.jsonl
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    # totals, summary: controller_totals.json and summary.json; empty without them
    totals: dict[str, Any]
    summary: dict[str, Any]
    # the store, frozen at one moment; None without one
    store: ColumnReader | None

    @property
    def config(self) -> Settings:
        """Return the settings of the newest start."""
        return self.starts[-1]

    @property
    def replays(self) -> bool:
        """Return whether batches are drawn from a replay buffer."""
        return bool(self.config["buffer.replay.capacity"])

    @property
    def resumes_from(self) -> int:
        """Return the step from which the run would continue."""
        return max(self.checkpoints, default=0)


@contextmanager
def open_records(run_dir: Path) -> Iterator[Records]:
    """Read the records of a run that ended, was killed or is still going.

    Raises ValueError for a directory without a training run.
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
    with open_columns(run_dir / STORE_FILE) as store:
        yield Records(**files, store=store)


@dataclass
class Check:
    """One line of the audit."""

    name: str  # one word
    looked_at: str  # what was checked, with its numbers
    # one sentence for each thing that is wrong; none if all is well
    wrong: list[str] = field(default_factory=list)

    def expect(self, good: bool, otherwise: str) -> None:
        """Record that something is wrong unless `good`."""
        if not good:
            self.wrong.append(otherwise)

    def none_of(self, found: Iterable[object], what: str) -> None:
        """Record that `found` should be empty. `what` says what they are: "groups that …"."""
        if ids := list(found):
            self.wrong.append(f"{what}: {some(ids)}")


def some(ids: Iterable[object]) -> str:
    """Write the first few of `ids`, and how many more there are."""
    listed = list(ids)
    more = f" and {len(listed) - _SHOWN:,} more" if len(listed) > _SHOWN else ""
    return ", ".join(map(str, listed[:_SHOWN])) + more
