"""Tokens that a small student needs to learn addition: from a teacher, from rewards, from both.

    bash examples/distillation/run.sh trainer.steps=1    # makes the two models
    python benchmarks/distillation.py    # a quarter of an hour; continues after a stop

All runs start from the same student, and make as many steps of as many trajectories. Problems are
new in each step, so the mean reward of a step is an accuracy on problems that were never seen. With
a teacher alone the reward only measures. The tokens that the teacher learned from do not count.

Writes <out>/distillation.json, one record per run, <out>/distillation.md and
<out>/distillation.png.
"""

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from launch import ROOT, areal_lite

MODELS = ROOT / "examples" / "models"
STEPS, BATCH = 40, 128
TARGETS = (0.6, 0.7, 0.8)
WINDOW = 8  # steps of the running mean: with rewards, a step has 16 problems only
FIRST = 50_000  # tokens
GROUPS = f"rollout.group_size=8 trainer.batch_groups={BATCH // 8}"
ARMS = {
    "teacher": f"algo=distill rollout.group_size=1 trainer.batch_groups={BATCH} trainer.lr=2e-4",
    "rewards": f"algo=quickstart {GROUPS} trainer.lr=3e-4",
    "both": f"algo=distill algo.advantage.estimator=grpo algo.kl.coef=0.3 {GROUPS} trainer.lr=2e-4",
}
COLORS = dict(zip(ARMS, ("#2e8b57", "#d1662b", "#1f6fb4")))
TRAIN = (
    "+task=addition data.args.max_digits=3 rollout.max_new_tokens=64"
    f" trainer.minibatches=4 trainer.steps={STEPS}"
    " trainer.lr_schedule=linear trainer.lr_warmup_steps=3 trainer.adam_eps=1e-5 eval.problems=500"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "distillation")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--student", type=Path, default=MODELS / "warm")
    parser.add_argument("--teacher", type=Path, default=MODELS / "teacher")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    records = []
    for seed in args.seeds:
        for arm in ARMS:
            models = {"model": args.student}
            if "algo=distill" in ARMS[arm]:
                models["algo.reference"] = args.teacher
            records.append(train(args.work, seed, arm, models))
            print({k: v for k, v in records[-1].items() if k != "curve"}, flush=True)
    result = {"settings": TRAIN, "arms": ARMS, "runs": records}
    (args.out / "distillation.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "distillation.md").write_text(table(records))
    plot(records, args.out / "distillation.png")
    print(table(records))


def train(work: Path, seed: int, arm: str, models: dict[str, Path]) -> dict:
    """Train one run unless it is finished; return its record."""
    run_dir = work / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
    if not (run_dir / "summary.json").exists():
        assert not run_dir.exists(), f"{run_dir} was not finished: remove it"
        own = [f"run_dir={run_dir}", f"seed={seed}"]
        own += [f"{key}={path}" for key, path in models.items()]
        log = work / f"{run_dir.name}.log"
        areal_lite(log, "train", *ARMS[arm].split(), *TRAIN.split(), *own)
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    tokens = np.cumsum([step["tokens"] for step in steps]).tolist()
    means = np.convolve([step["reward_mean"] for step in steps], np.ones(WINDOW) / WINDOW, "valid")
    curve = list(zip(tokens[WINDOW - 1 :], means.round(4).tolist()))
    return {
        "arm": arm,
        "seed": seed,
        "tokens_to": {
            str(target): next((count for count, mean in curve if mean >= target), None)
            for target in TARGETS
        },
        "first": float(np.mean([s["reward_mean"] for s, t in zip(steps, tokens) if t < FIRST])),
        "greedy": [summary["greedy_before"], summary["greedy_after"]],
        "sampled": [summary["sampled_before"], summary["sampled_after"]],
        "curve": curve,
    }


def table(records: list[dict]) -> str:
    """Return the table of all runs, as Markdown."""
    seeds = len({record["seed"] for record in records})
    head = [f"thousand tokens to {target:.0%}" for target in TARGETS]
    lines = [
        f"`python benchmarks/distillation.py`: {STEPS} steps of {BATCH} trajectories, {seeds}"
        f" seeds. Tokens that the student sampled until the mean reward of {WINDOW} steps reached a"
        " level, for each seed (– if it never did), and the held-out accuracy before and after"
        " (means of the seeds).",
        "",
        f"| learns from | {' | '.join(head)} | mean reward of the first {FIRST // 1000} thousand "
        "| greedy | sampled |",
        f"|---|{'---|' * len(head)}---|---|---|",
    ]
    for arm in ARMS:
        own = [record for record in records if record["arm"] == arm]
        cells = [
            ", ".join(
                "–" if (count := r["tokens_to"][str(target)]) is None else f"{count / 1000:.0f}"
                for r in own
            )
            for target in TARGETS
        ]
        cells.append(", ".join(f"{record['first']:.2f}" for record in own))
        cells += [
            " → ".join(f"{statistics.mean(r[key][when] for r in own):.1%}" for when in (0, 1))
            for key in ("greedy", "sampled")
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    lines += ["", "![Reward by the tokens that the student sampled](distillation.png)", ""]
    lines.append("There is one learning rate for each setting, and one student and one teacher.")
    return "\n".join(lines) + "\n"


def plot(records: list[dict], path: Path) -> None:
    """Draw the reward of each run by the tokens that the student sampled."""
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for arm, color in COLORS.items():
        for number, run in enumerate(record for record in records if record["arm"] == arm):
            tokens, means = zip(*run["curve"])
            label = None if number else arm
            axes.plot(np.divide(tokens, 1000), means, color=color, label=label, alpha=0.8)
    axes.set(xlabel="thousand tokens sampled", ylabel=f"mean reward of {WINDOW} steps", ylim=(0, 1))
    axes.legend(frameon=False, title="learns from", loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
