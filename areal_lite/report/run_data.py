"""What a run directory tells, read back: of a run that is complete, that still goes, or that was killed half-way."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.store import Store

_COLUMNS = "group_id sample_index state step reward n_prompt n_tokens min_version max_version started_at finished_at segments".split()


@dataclass
class RunData:
    """`metrics` and `evals` are lines in the order of their writing. A trajectory is a dict of the store's columns without its token
    arrays, plus `sampled`, its number of sampled tokens. `tickets` counts them by state. `totals` are the controller's, None until it has
    ended. `staleness_bound` is None without a config.yaml or with replay. `missing` counts trajectories that tickets should have, but the store lacks.
    """

    run_dir: Path
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    tickets: dict[str, int] = field(default_factory=dict)
    totals: dict[str, Any] | None = None
    staleness_bound: int | None = None
    missing: int = 0

    @property
    def used(self) -> list[dict[str, Any]]:
        """Trajectories that were trained on."""
        return [t for t in self.trajectories if t["state"] == "used"]

    def series(self, key: str) -> list[float]:
        """`key` of each training step, NaN where it is unknown."""
        return [float("nan") if m.get(key) is None else m[key] for m in self.metrics]

    @property
    def pushes(self) -> dict[int, tuple[float, float]]:
        """version -> (wall-clock seconds at the start, duration in seconds) of the pause in which it was pushed."""
        lines = [m for m in self.metrics if m.get("paused_at") and m["pause_s"] is not None]
        return {m["version"]: (m["paused_at"], m["pause_s"]) for m in lines}

    @property
    def training_started_at(self) -> float | None:
        """Wall-clock seconds at which the first trajectory was begun: before that, servers were starting. None if nothing happened."""
        if self.trajectories:
            return min(t["started_at"] for t in self.trajectories)
        return (
            self.metrics[0]["logged_at"] - (self.metrics[0]["time_s"] or 0.0)
            if self.metrics
            else None
        )

    @property
    def training_s(self) -> float:
        """Seconds from there to the end of the last training step; 0 before the first."""
        return self.metrics[-1]["logged_at"] - self.training_started_at if self.metrics else 0.0


def load_run(run_dir: Path) -> RunData:
    """Read what is there; what is not there yet is empty. Raises ValueError when the directory does not exist."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a run directory")
    run = RunData(run_dir, read_metrics(run_dir), read_events(run_dir, "evals"))
    if (run_dir / "config.yaml").exists():
        config = OmegaConf.load(run_dir / "config.yaml")
        replays = OmegaConf.select(config, "buffer.replay.capacity")
        run.staleness_bound = None if replays else OmegaConf.select(config, "buffer.max_staleness")
    if (run_dir / "controller_totals.json").exists():
        run.totals = json.loads((run_dir / "controller_totals.json").read_text())
    if (run_dir / "trajectories.sqlite").exists():
        store = Store(run_dir / "trajectories.sqlite", read_only=True)
        try:
            run.tickets, run.missing = store.counts(), store.missing_trajectories()
            run.trajectories = [_slim(row) for row in store.trajectories()]
        finally:
            store.close()
    return run


def _slim(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: row[name] for name in _COLUMNS},
        "sampled": sum(end - start for _, start, end in row["segments"]),
    }
