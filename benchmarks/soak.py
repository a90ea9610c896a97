"""Memory of every role of a run over half an hour: does any of them grow?

    python benchmarks/soak.py [--minutes 30]    # two cores

The run is `areal-lite train` with a real SGLang server and a real Megatron trainer. Everything that
may pile up happens often: pushes, evaluations, checkpoints, and removals from a store that has
reached its bound. The learning rate is so small that the answers keep their lengths. A process's
memory is its proportional set size, so that shared pages count once. Growth is the slope of a line
through the second half of the samples, with a 95 % interval from ten blocks of them.

Writes <out>/soak.json and <out>/soak.png.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import psutil
from launch import ROOT, warm_up
from scipy import stats

MODEL = ["hidden_size=96", "num_layers=3", "mlp_size=192"]
WARM_UP = "max_digits=3 batch_size=32 forget_carry=0.65 trainer.steps=300 trainer.lr=4e-3"
TRAIN = (
    "+task=addition data.args.max_digits=3 algo=quickstart rollout.group_size=8"
    " rollout.max_new_tokens=64 rollout.max_concurrent=256 trainer.batch_groups=16"
    " trainer.steps=1000000 trainer.lr=1e-7 trainer.save_every=50 eval.every=50 eval.problems=64"
    " store.max_gib=0.02"
)
ROLES = {
    "areal_lite.controller.service": "controller",
    "areal_lite.trainer.loop": "trainer",
    "areal_lite.launch.serve": "server",
}
EVERY_S = 10.0
BLOCKS = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "soak", help="run directory")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    model = warm_up(args.work, 1, MODEL, WARM_UP.split())
    run_dir = args.work / "run"
    assert not run_dir.exists(), f"{run_dir} exists: remove it"
    samples = run_and_sample(model, run_dir, 60 * args.minutes)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    result = {
        "minutes": args.minutes,
        "steps": len(steps),
        "trajectories": sum(step["trajectories"] for step in steps),
        "store_mib": round(steps[-1]["store_mib"], 1),
        "roles": {role: growth(points) for role, points in sorted(samples.items())},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(samples, args.out / "soak.png")
    print(json.dumps(result, indent=1))


def run_and_sample(model: Path, run_dir: Path, seconds: float) -> dict[str, list]:
    """Train for `seconds` after the first step; return (seconds, MiB) by role."""
    samples: dict[str, list] = defaultdict(list)
    command = [sys.executable, "-m", "areal_lite", "train", *TRAIN.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(run_dir.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            [*command, f"model={model}", f"run_dir={run_dir}"],
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        while not (run_dir / "metrics.jsonl").exists():
            assert process.poll() is None, run_dir.with_suffix(".log").read_text()
            time.sleep(1)
        started = time.monotonic()
        while (now := time.monotonic() - started) < seconds:
            assert process.poll() is None, run_dir.with_suffix(".log").read_text()
            for role, mib in memory_of(psutil.Process(process.pid)).items():
                samples[role].append((now, mib))
            time.sleep(EVERY_S)
        process.send_signal(signal.SIGUSR1)  # it saves, and ends after its step
        process.wait(120)
    finally:
        process.kill()
        process.wait()
    return samples


def memory_of(supervisor: psutil.Process) -> dict[str, float]:
    """Return the proportional set size of each role, in MiB."""
    mib: dict[str, float] = defaultdict(float)
    mib["supervisor"] = supervisor.memory_full_info().pss / 2**20
    for child in supervisor.children():
        role = next((name for part in child.cmdline() if (name := ROLES.get(part))), "others")
        for process in [child, *child.children(recursive=True)]:
            mib[role] += process.memory_full_info().pss / 2**20
    return mib


def growth(points: list) -> dict[str, float]:
    """Return the memory at the end in MiB, and its growth in MiB an hour with half an interval."""
    seconds, mib = np.array(points[len(points) // 2 :]).T
    blocks = [part.mean() for part in np.array_split(mib, BLOCKS)]
    hours = [part.mean() / 3600 for part in np.array_split(seconds, BLOCKS)]
    line = stats.linregress(hours, blocks)
    return {
        "mib": round(float(mib[-1]), 1),
        "mib_per_hour": round(line.slope, 1),
        "interval": round(line.stderr * stats.t.ppf(0.975, BLOCKS - 2), 1),
    }


def draw(samples: dict[str, list], path: Path) -> None:
    """Draw the memory of each role over time, relative to that after a third of the run."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for role, points in sorted(samples.items()):
        seconds, mib = np.array(points).T
        axes.plot(seconds / 60, mib - mib[len(mib) // 3], label=f"{role}, {mib[-1]:.0f} MiB")
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("MiB more than after a third")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
