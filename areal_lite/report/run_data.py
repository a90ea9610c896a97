"""The records in a run directory, read back. The run may be complete, still going or killed."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areal_lite.report.measures import downtime_s
from areal_lite.report.windows import pushes_of
from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.paths import CONFIG_FILE, STORE_FILE, TOTALS_FILE
from areal_lite.run_dir.store import Store

_COLUMNS = (
    "group_id",
    "sample_index",
    "state",
    "step",
    "reward",
    "n_prompt",
    "n_tokens",
    "min_version",
    "max_version",
    "started_at",
    "finished_at",
    "segments",
)


@dataclass(kw_only=True)
class RunData:
    """The records of one run.

    `metrics` and `evals` hold lines in the order in which they were written. A trajectory is a dict
    of the store's columns without the token arrays, plus `sampled`, its number of sampled tokens.
    """

    run_dir: Path
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    # Number of rollout groups by state.
    groups: dict[str, int] = field(default_factory=dict)
    # The controller writes its totals when it ends.
    totals: dict[str, Any] | None = None
    # None without a config.yaml, and with replay, which has no bound.
    staleness_bound: int | None = None
    # Trajectories that groups should have and the store lacks.
    missing: int = 0

    @property
    def used(self) -> list[dict[str, Any]]:
        """Return the trajectories that the run trained on."""
        return [t for t in self.trajectories if t["state"] == "used"]

    def series(self, key: str) -> list[float]:
        """Return `key` of each training step, NaN where it is unknown."""
        return [float("nan") if m.get(key) is None else m[key] for m in self.metrics]

    @property
    def pushes(self) -> dict[int, tuple[float, float]]:
        """Return the pause of each version's push: (wall-clock seconds of the start, seconds)."""
        return pushes_of(self.metrics)

    @property
    def training_started_at(self) -> float | None:
        """Return the wall-clock seconds at which the first trajectory started; None before that.

        Server start-up is earlier.
        """
        if self.trajectories:
            return min(t["started_at"] for t in self.trajectories)
        if self.metrics:
            return self.metrics[0]["logged_at"] - (self.metrics[0]["time_s"] or 0.0)
        return None

    @property
    def training_s(self) -> float:
        """Return the seconds from `training_started_at` to the end of the last step; 0 without one.

        The time between an end and a resumed start is left out.
        """
        started_at = self.training_started_at
        if not self.metrics or started_at is None:
            return 0.0
        return self.metrics[-1]["logged_at"] - started_at - downtime_s(self.metrics)


def load_run(run_dir: Path) -> RunData:
    """Read all records that exist. Raises ValueError when `run_dir` is not a directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a run directory: there is no such folder")
    run = RunData(
        run_dir=run_dir, metrics=read_metrics(run_dir), evals=read_events(run_dir, "evals")
    )
    if (run_dir / CONFIG_FILE).exists():
        config = OmegaConf.load(run_dir / CONFIG_FILE)
        replays = OmegaConf.select(config, "buffer.replay.capacity")
        run.staleness_bound = None if replays else OmegaConf.select(config, "buffer.max_staleness")
    if (run_dir / TOTALS_FILE).exists():
        run.totals = json.loads((run_dir / TOTALS_FILE).read_text())
    if (run_dir / STORE_FILE).exists():
        _read_store(run, run_dir / STORE_FILE)
    return run


def _read_store(run: RunData, path: Path) -> None:
    store = Store(path, read_only=True)
    try:
        run.groups = store.counts()
        run.missing = store.missing_trajectories()
        run.trajectories = [_without_tokens(row) for row in store.trajectories()]
    finally:
        store.close()


def _without_tokens(row: dict[str, Any]) -> dict[str, Any]:
    sampled = sum(end - start for _, start, end in row["segments"])
    return {**{name: row[name] for name in _COLUMNS}, "sampled": sampled}
