"""The simulator against a real run: speeds measured in it, everything else predicted.

    python -m benchmarks.simulator_run runs/NAME [runs/OTHER …]

For each run directory, lengths and speeds are those of the run (simulate.measured_run), and the
simulation repeats its settings. What is compared follows from the controller and not from the fit:
trained tokens a second, who waits, and the staleness of tokens. Steps before the measured ones are
left out of both.

With `--speeds runs/OTHER`, lengths and speeds are those of the other run.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from areal_lite.config import load_config
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.reader import RunReader
from benchmarks.littles_law import littles_law
from benchmarks.simulate.run import rounded, simulate, summarize
from benchmarks.simulate.workload import measured_workload

WARM_UP = 4  # steps


def measured(run_dir: Path, max_staleness: int) -> dict:
    """Return what a run did after the warm-up."""
    records = read_metrics(run_dir)
    late, seconds = records[WARM_UP:], records[-1]["logged_at"] - records[WARM_UP - 1]["logged_at"]
    store = RunReader(run_dir / STORE_FILE)
    ages = np.zeros(max_staleness + 1)
    for row in store.trajectories(state="used"):
        if row["step"] >= WARM_UP:
            staleness = row["step"] - row["versions"][row["versions"] >= 0]
            trained = staleness[staleness <= max_staleness]
            ages += np.bincount(trained, minlength=max_staleness + 1)
    store.close()
    return {
        "tokens_per_s": sum(r["tokens"] for r in late) / seconds,
        "wait_share": sum(r["wait_s"] for r in late) / seconds,
        "train_share": sum(r["train_s"] for r in late) / seconds,
        "push_share": sum(r["push_s"] for r in late) / seconds,
        "staleness": (ages / ages.sum()).tolist(),
        "staleness_mean": float(ages @ np.arange(len(ages)) / ages.sum()),
    }


def compared(run_dir: Path, speeds: Path) -> dict:
    """Simulate the settings of a run with the speeds of another, and compare."""
    config = load_config(run_dir)
    steps = len(read_metrics(run_dir)) - WARM_UP
    work = measured_workload(speeds, WARM_UP, steps)
    summary = summarize(simulate(config, work))
    real = measured(run_dir, config.buffer.max_staleness)
    ages = np.zeros(len(real["staleness"]))
    ages[: len(summary.staleness)] = summary.staleness
    predicted = {key: getattr(summary, key) for key in real} | {"staleness": ages.tolist()}
    return {
        "run": run_dir.name,
        "speeds_of": speeds.name,
        "steps": steps,
        "settings": {
            "buffer.max_staleness": config.buffer.max_staleness,
            "rollout.interrupt": config.rollout.interrupt,
            "batch": config.trainer.batch_groups * config.rollout.group_size,
        },
        "measured": real,
        "predicted": predicted,
        "speed_error": predicted["tokens_per_s"] / real["tokens_per_s"] - 1,
        "largest_staleness_error": float(np.abs(ages - real["staleness"]).max()),
        "little_error": littles_law(config, work) / real["tokens_per_s"] - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--speeds", type=Path, help="run whose speeds and lengths are used")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    records = [compared(run, args.speeds or run) for run in args.runs]
    text = json.dumps(rounded(records), indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
