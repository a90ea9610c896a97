"""Accuracy against staleness: decoupled and naive PPO on addition.

    python benchmarks/staleness.py    # an hour on two cores; continues after a stop

The runs have max_staleness 0, 1, 4, 8 and 16, with three seeds each. Every run is `areal-lite
train` of this checkout, with a real SGLang server and a real Megatron trainer. `buffer.fixed_lag`
makes every token exactly max_staleness versions old after the first steps, so the result does not
depend on the speed of the machine. A step has four minibatches: with one, the ratio to the
proximal policy is 1 and nothing would be clipped. The runs of a seed start from the same warmed-up
model and see the same prompts.

Writes <out>/staleness.json, one record per run, and <out>/staleness.png.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
DIGITS = "data.max_digits=4"
MODEL = ["hidden_size=96", "num_layers=3", "mlp_size=192"]
WARM_UP = (
    f"{DIGITS} batch_size=32 forget_carry=0.4 "
    "trainer.steps=400 trainer.lr=4e-3 trainer.min_lr=8e-5 trainer.lr_schedule=cosine"
)
WARM_UP += " trainer.lr_warmup_steps=20 trainer.weight_decay=0.01"
TRAIN = (
    f"{DIGITS} rollout.group_size=8 rollout.max_new_tokens=64 rollout.max_concurrent=512 "
    "trainer.batch_groups=32 trainer.minibatches=4 trainer.lr=3e-4 trainer.min_lr=3e-5 "
    "trainer.lr_schedule=linear trainer.lr_warmup_steps=3 trainer.adam_eps=1e-5"
)
TRAIN += " algo=quickstart algo.prox=recompute eval.problems=512 buffer.fixed_lag=true"
ARMS = {"decoupled": "true", "naive": "false"}
LAST = 10  # steps whose mean reward is reported beside the accuracy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "staleness", help="run directories"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 8, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument(
        "--parallel", type=int, default=2, help="runs side by side, each busy on about one core"
    )
    args = parser.parse_args()
    runs = [
        (seed, staleness, arm)
        for seed in args.seeds
        for staleness in args.staleness
        for arm in ARMS
    ]
    with ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(lambda seed: warm_up(args.work, seed, MODEL, WARM_UP.split()), args.seeds))
        records = []
        for record in pool.map(lambda run: train(args.work, *run, args.steps), runs):
            records.append(record)
            print(
                f"{len(records)}/{len(runs)}",
                {k: v for k, v in record.items() if k != "rewards"},
                flush=True,
            )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "staleness.json").write_text(
        json.dumps({"settings": TRAIN, "steps": args.steps, "runs": records}, indent=1) + "\n"
    )
    plot(records, args.out / "staleness.png")


def areal_lite(log: Path, *arguments: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        subprocess.run(
            [sys.executable, "-m", "areal_lite", *arguments],
            env=environment,
            stdout=file,
            stderr=file,
            check=True,
        )


def warm_up(work: Path, seed: int, model: list[str], settings: list[str]) -> None:
    """Make <work>/warm-<seed>, a model after `sft` with these settings, unless it exists."""
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


def train(work: Path, seed: int, staleness: int, arm: str, steps: int) -> dict:
    """Train one run unless it is finished; return its record."""
    run_dir = work / f"{arm}-{staleness}-{seed}"
    if not (run_dir / "summary.json").exists():
        assert not run_dir.exists(), f"{run_dir} was not finished: remove it"
        own = [
            f"run_dir={run_dir}",
            f"model={work / f'warm-{seed}'}",
            f"seed={seed}",
            f"data.seed={seed}",
            f"trainer.steps={steps}",
        ]
        own += [f"buffer.max_staleness={staleness}", f"algo.decoupled={ARMS[arm]}"]
        areal_lite(work / f"{run_dir.name}.log", "train", *TRAIN.split(), *own)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == steps, (
        f"{run_dir} was stopped after {summary['steps']} steps: remove it"
    )
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "arm": arm,
        "max_staleness": staleness,
        "seed": seed,
        "accuracy_before": summary["sampled_before"],
        "accuracy": summary["sampled_after"],
        "greedy": summary["greedy_after"],
        "reward_last": float(np.mean([m["reward_mean"] for m in metrics[-LAST:]])),
        "staleness_last": metrics[-1]["staleness_mean"],
        "clip_fraction": float(np.mean([m["clip_fraction"] for m in metrics])),
        "behave_kl": float(np.mean([m["behave_kl"] for m in metrics])),
        "ess": float(np.mean([m["ess"] for m in metrics])),
        "wall_s": summary["wall_s"],
        "rewards": [round(m["reward_mean"], 4) for m in metrics],
    }


COLORS = {"decoupled": "#1f6fb4", "naive": "#d1662b"}


def plot(records: list[dict], path: Path) -> None:
    """Draw the figure.

    Left: accuracy of the final weights, one point per seed and a line of the means. Right: reward
    over the run, mean of the seeds.
    """
    bounds = sorted({r["max_staleness"] for r in records})
    figure, (left, *curves) = plt.subplots(
        1, 1 + len(bounds), figsize=(4 + 2.6 * len(bounds), 3.6), layout="constrained"
    )
    for shift, (arm, color) in zip((-0.06, 0.06), COLORS.items()):
        places = np.arange(len(bounds)) + shift
        points = [
            [r["accuracy"] for r in records if r["arm"] == arm and r["max_staleness"] == bound]
            for bound in bounds
        ]
        left.plot(places, [np.mean(p) for p in points], color=color, label=arm)
        for place, values in zip(places, points):
            left.plot([place] * len(values), values, "o", color=color, markersize=4, alpha=0.7)
        for axes, bound in zip(curves, bounds):
            rewards = np.array(
                [r["rewards"] for r in records if r["arm"] == arm and r["max_staleness"] == bound]
            )
            steps = np.arange(1, rewards.shape[1] + 1)
            axes.fill_between(
                steps, rewards.min(0), rewards.max(0), color=color, alpha=0.15, linewidth=0
            )
            axes.plot(steps, rewards.mean(0), color=color)
    left.set(
        xticks=range(len(bounds)),
        xticklabels=bounds,
        xlabel="max_staleness",
        ylabel="held-out accuracy, sampled",
    )
    left.set(ylim=(0, 1.02), title="after the last step")
    left.legend(frameon=False, loc="lower left")
    for axes, bound in zip(curves, bounds):
        axes.set(ylim=(0, 1.02), xlabel="step", title=f"reward, max_staleness {bound}")
    for axes in (left, *curves):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
