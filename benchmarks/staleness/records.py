"""Runs and their records: one line of JSON per finished run, which is never run again."""

import json
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.launch import areal_lite, warm_up
from benchmarks.staleness.carries import carry_logprobs
from benchmarks.staleness.checks import check_run
from benchmarks.staleness.studies import GROUPS, MODEL, WARM_UP, Cell

_MEANS = ("clip_fraction", "clip_fraction_high", "behave_kl", "ess", "weight_max", "grad_norm")


def read(path: Path) -> list[dict]:
    """Return the records of all runs."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def warm(work: Path, seed: int) -> Path:
    """Return the warmed-up model of a seed. Make it if needed."""
    return warm_up(work, seed, MODEL.split(), WARM_UP.split())


def run(work: Path, cell: Cell) -> dict:
    """Train one run and return its record. Its directory is removed."""
    run_dir = work / cell.name
    if run_dir.exists():  # a run that was stopped
        shutil.rmtree(run_dir)
    model = warm(work, cell.seed)
    own = [f"run_dir={run_dir}", f"model={model}"]
    areal_lite(work / f"{cell.name}.log", "train", *own, *cell.settings)
    # Warm-up may round differently on another machine: then a seed has another model there.
    checksum = zlib.crc32((model / "model.safetensors").read_bytes())
    record = _record(run_dir, cell) | {"model": checksum}
    shutil.rmtree(run_dir)
    return record


def _record(run_dir: Path, cell: Cell) -> dict:
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == cell.steps, f"{run_dir} was stopped after {len(rows)} steps"
    late = [row["staleness_mean"] for row in rows[cell.lag :]]
    assert set(late) == {float(cell.lag)}, f"{run_dir}: the lag was not {cell.lag}"
    store = run_dir / "trajectories.sqlite"
    return {
        "name": cell.name,
        **asdict(cell),
        "accuracy_before": summary["sampled_before"],
        "accuracy": summary["sampled_after"],
        "greedy": summary["greedy_after"],
        "prompts": check_run(store, rows, GROUPS),
        "wall_s": round(summary["wall_s"], 1),
        **{key: _mean(rows, key) for key in _MEANS},
        "rewards": [round(row["reward_mean"], 4) for row in rows],
        "drift": [round(row["behave_kl"], 5) for row in rows],
        "carry": [None if value is None else round(value, 3) for value in carry_logprobs(store)],
    }


def _mean(rows: list[dict], key: str) -> float | None:
    known = [row[key] for row in rows if row.get(key) is not None]
    return float(f"{np.mean(known):.4g}") if known else None
