"""Everything that the page of one run shows, read and counted from its directory.

The store is read once; time and memory grow linearly with the number of trajectories, and the size
of the page does not: charts have at most a fixed number of points, and rollouts are a sample.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from areal_lite.report.columns import Columns, read_columns
from areal_lite.report.facts import count_facts
from areal_lite.report.lanes import build_lanes, time_edges
from areal_lite.report.pieces import token_decoder
from areal_lite.report.samples import choose_groups, read_groups
from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.paths import CONFIG_FILE, METRICS_FILE, STORE_FILE, SUMMARY_FILE

# The values of these keys are never shown.
_SECRET = re.compile(r"(api_)?key|token|password|secret", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records of a run directory: metrics, evaluations, configuration, store."""

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

    def facts(self) -> dict[str, float | None]:
        """Return the final numbers, see FACTS."""
        return count_facts(self.metrics, self.evals, self.columns)


def read_run(run_dir: Path) -> RunRecords:
    """Read the records of a run, as far as it got.

    Raises ValueError for a directory that is not that of a training run.
    """
    run_dir = Path(run_dir)
    if not any((run_dir / name).exists() for name in (CONFIG_FILE, METRICS_FILE, STORE_FILE)):
        raise ValueError(f"{run_dir} is not the directory of a training run: give one")
    return RunRecords(
        run_dir=run_dir,
        metrics=read_metrics(run_dir),
        evals=read_events(run_dir, "evals"),
        config=read_run_config(run_dir),
        columns=read_columns(run_dir / STORE_FILE),
        ended=(run_dir / SUMMARY_FILE).exists(),
    )


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Return the configuration of a run without keys and tokens; {} without a config.yaml."""
    if not (run_dir / CONFIG_FILE).exists():
        return {}
    return _public(OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG_FILE), resolve=False))


def rollout_sample(run: RunRecords) -> list[dict[str, Any]]:
    """Return the groups of the rollout browser with their tokens."""
    lines = read_events(run.run_dir, "proximal")
    # A resumed run repeats steps: the last line of a step is true.
    recorded = {line["step"]: line["group_id"] for line in lines}
    prox = {
        line["group_id"]: line["prox"]
        for line in lines
        if recorded[line["step"]] == line["group_id"]
    }
    groups = choose_groups(run.columns, recorded)
    if not groups:
        return []
    decode = token_decoder(run.run_dir, run.config.get("model"))
    store = run.run_dir / STORE_FILE
    return list(read_groups(store, groups, prox, decode, run.staleness_bound))


def lane_data(run: RunRecords, edges: np.ndarray) -> dict[str, Any]:
    """Return the utilization lanes for the page: shares per bin, and over the whole run."""
    lanes = build_lanes(run.columns, run.metrics, run.batch_groups, edges)
    return {
        "bins": len(edges) - 1,
        "seconds": float(edges[-1] - edges[0]),
        "lanes": [
            {
                "name": lane["name"],
                "shares": {
                    state: [round(float(share), 3) for share in shares]
                    for state, shares in lane["shares"].items()
                },
            }
            for lane in lanes
        ],
        "totals": [
            (
                lane["name"],
                [(state, f"{s.mean():.1%}") for state, s in lane["shares"].items() if s.any()],
            )
            for lane in lanes
        ],
    }


def edges_of(run: RunRecords) -> np.ndarray | None:
    """Return the edges of the bins of time, see `time_edges`."""
    return time_edges(run.columns, run.metrics)


def _public(node: Any) -> Any:
    """Return the configuration without keys and tokens."""
    if isinstance(node, Mapping):
        return {
            str(key): _public(value)
            for key, value in node.items()
            if not (_SECRET.fullmatch(str(key)) and value is not None)
        }
    return [_public(value) for value in node] if isinstance(node, list) else node
