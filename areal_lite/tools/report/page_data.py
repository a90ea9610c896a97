"""Everything that the page of one run shows, read and counted from its directory.

The store is read once; time and memory grow linearly with the number of trajectories, and the size
of the page does not: charts have at most a fixed number of points, and rollouts are a sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from areal_lite.run_dir.metrics import read_events
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.tools.report.lanes import build_lanes
from areal_lite.tools.report.pieces import token_decoder
from areal_lite.tools.report.run_data import RunData
from areal_lite.tools.report.samples import choose_groups, read_groups


def rollout_sample(run: RunData) -> list[dict[str, Any]]:
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


def lane_data(run: RunData, edges: np.ndarray) -> dict[str, Any]:
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
