"""Runs of `areal-lite` for benchmarks: each a process of this checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def areal_lite(log: Path, *arguments: str) -> None:
    """Run `areal-lite` with one thread per role and its output in `log`.

    Raises CalledProcessError if it fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "areal_lite", *arguments]
    with open(log, "w") as file:
        subprocess.run(command, env=environment, stdout=file, stderr=file, check=True)


def warm_up(work: Path, seed: int, model: list[str], settings: list[str]) -> Path:
    """Return <work>/warm-<seed>, a model after `sft` with these settings. Make it if needed."""
    cold, warm = work / f"cold-{seed}", work / f"warm-{seed}"
    if not warm.exists():
        own = [
            f"model={cold}",
            f"out={warm}",
            f"run_dir={work / f'sft-{seed}'}",
            f"seed={seed}",
            f"data.seed={seed}",
        ]
        areal_lite(work / f"cold-{seed}.log", "make-model", f"out={cold}", f"seed={seed}", *model)
        areal_lite(work / f"warm-{seed}.log", "sft", *own, *settings)
    return warm
