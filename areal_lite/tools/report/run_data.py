"""The records in a run directory, read back. The run may be complete, still going or killed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.paths import CONFIG_FILE, METRICS_FILE, STORE_FILE, SUMMARY_FILE
from areal_lite.tools.report.columns import Columns, read_columns
from areal_lite.tools.report.facts import count_facts, first_started, training_s
from areal_lite.tools.report.windows import Pauses, pushes_of

# The values of these keys are never shown.
_SECRET = re.compile(r"(api_)?key|token|password|secret", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The records of one run.

    `metrics` and `evals` hold lines in the order in which they were written. `config` is empty
    without a config.yaml.
    """

    run_dir: Path
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    config: dict[str, Any]
    columns: Columns
    ended: bool

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def staleness_bound(self) -> int | None:
        """Return the largest staleness of a trained token; None for a run with replay."""
        buffer = self.config.get("buffer", {})
        return None if buffer.get("replay", {}).get("capacity") else buffer.get("max_staleness")

    @property
    def batch_groups(self) -> int:
        return self.config.get("trainer", {}).get("batch_groups", 1)

    @property
    def steps_planned(self) -> int | None:
        return self.config.get("trainer", {}).get("steps")

    @property
    def pushes(self) -> Pauses:
        """Return the pause of each version's push: (wall-clock seconds of the start, seconds)."""
        return pushes_of(self.metrics)

    @property
    def started_at(self) -> float | None:
        """Return the wall-clock seconds of the first trajectory's start; None before it."""
        return first_started(self.metrics, self.columns)

    @property
    def training_s(self) -> float:
        """Return the seconds from `started_at` to the end of the last step; 0 without one."""
        return training_s(self.metrics, self.columns)

    def series(self, key: str) -> np.ndarray:
        """Return `key` of each training step, float64 [steps], NaN where it is unknown."""
        return np.array([m.get(key) for m in self.metrics], np.float64)

    def facts(self) -> dict[str, Any]:
        """Return the final numbers, see FACTS."""
        return count_facts(self.metrics, self.evals, self.columns)


def load_run(run_dir: Path) -> RunData:
    """Read all records that exist. Raises ValueError when `run_dir` is not a directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a run directory: there is no such folder")
    return RunData(
        run_dir=run_dir,
        metrics=read_metrics(run_dir),
        evals=read_events(run_dir, "evals"),
        config=read_run_config(run_dir),
        columns=read_columns(run_dir / STORE_FILE),
        ended=(run_dir / SUMMARY_FILE).exists(),
    )


def read_run(run_dir: Path) -> RunData:
    """Read the records of a run, as far as it got.

    Raises ValueError for a directory that is not that of a training run.
    """
    run_dir = Path(run_dir)
    if not any((run_dir / name).exists() for name in (CONFIG_FILE, METRICS_FILE, STORE_FILE)):
        raise ValueError(f"{run_dir} is not the directory of a training run: give one")
    return load_run(run_dir)


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Return the configuration of a run without keys and tokens; {} without a config.yaml."""
    if not (run_dir / CONFIG_FILE).exists():
        return {}
    return _public(OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG_FILE), resolve=False))


def _public(node: Any) -> Any:
    """Return the configuration without keys and tokens."""
    if isinstance(node, Mapping):
        return {
            str(key): _public(value)
            for key, value in node.items()
            if not (_SECRET.fullmatch(str(key)) and value is not None)
        }
    return [_public(value) for value in node] if isinstance(node, list) else node
