"""Rare rewards: Trajectory Balance with and without replay, and GRPO, on sums that mostly fail.

    python benchmarks/sparse_reward.py    # 45 minutes on two cores; continues after a stop

Every column of every problem carries, and the teacher of the warm-up forgot most carries: hardly
one completion per step is right. Without the buffer, a right completion is trained on once; with
it, again and again. There are few prompts, so that a prompt meets its own successes again. Held-out
problems are of the same kind. Every run is `areal-lite train`. The runs of a seed start from the
same model, see the same prompts, and make as many steps of as many trajectories.

Writes <out>/sparse_reward.json, one record per run, and <out>/sparse_reward.png.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from launch import ROOT, areal_lite, warm_up

from areal_lite_quickstart import addition

DIGITS = 3
PROMPTS = 64
HELD_OUT = 256
MODEL = ["hidden_size=96", "num_layers=3", "mlp_size=192"]
WARM_UP = (
    f"max_digits={DIGITS} batch_size=32 trainer.steps=400"
    " trainer.lr=4e-3 trainer.min_lr=8e-5 trainer.lr_schedule=cosine trainer.lr_warmup_steps=20"
    " trainer.weight_decay=0.01"
)
TRAIN = (
    "data.source=jsonl data.chat=false"
    " reward.function=areal_lite_quickstart.addition:addition_reward"
    " rollout.group_size=8 rollout.max_new_tokens=64 rollout.max_concurrent=256"
    " trainer.batch_groups=16"
    " trainer.lr=3e-4 trainer.min_lr=3e-5 trainer.lr_schedule=linear trainer.lr_warmup_steps=3"
    " trainer.adam_eps=1e-5"
    f" eval.problems={HELD_OUT}"
)
TB = "algo=tba algo.kl.coef=0.05"
ARMS = {
    "TB with replay": f"{TB} buffer.replay.capacity=64 buffer.replay.recency_probability=0.5",
    "TB": TB,
    "GRPO": "algo=quickstart",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "sparse_reward", help="run directories"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--forget",
        type=float,
        nargs="+",
        default=[0.85, 0.92],
        help="share of the carries that the teacher forgets",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", PROMPTS), ("test", HELD_OUT)):
        rows = [
            json.dumps({"question": addition.prompt(p), "answer": addition.answer(p)})
            for p in problems(split, count)
        ]
        (args.work / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    records = []
    for forget in args.forget:
        for seed in args.seeds:
            work = args.work / f"forget-{forget:g}"
            warm_up(work, seed, MODEL, [*WARM_UP.split(), f"forget_carry={forget}"])
            for arm in ARMS:
                records.append({"forget": forget, **train(args.work, work, seed, arm, args.steps)})
                print({k: v for k, v in records[-1].items() if k != "rewards"}, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "sparse_reward.json").write_text(
        json.dumps({"settings": TRAIN, "arms": ARMS, "runs": records}, indent=1) + "\n"
    )
    plot(records, args.out / "sparse_reward.png")


def problems(split: addition.Split, count: int) -> list[addition.Problem]:
    """Return the first `count` problems of `DIGITS` digits in which every column carries."""
    found, index = [], 0
    while len(found) < count:
        problem = addition.make_problem(
            split, index, max_digits=DIGITS, weights=[0] * (DIGITS - 1) + [1]
        )
        places = [10 ** (place + 1) for place in range(DIGITS)]
        if all(problem.a % place + problem.b % place >= place for place in places):
            found.append(problem)
        index += 1
    return found


def train(data: Path, work: Path, seed: int, arm: str, steps: int) -> dict:
    """Train one run unless it is finished; return its record."""
    run_dir = work / f"{arm.lower().replace(' ', '-')}-{seed}"
    if not (run_dir / "summary.json").exists():
        assert not run_dir.exists(), f"{run_dir} was not finished: remove it"
        own = [
            f"run_dir={run_dir}",
            f"model={work / f'warm-{seed}'}",
            f"seed={seed}",
            f"trainer.steps={steps}",
        ]
        own += [f"data.path={data / 'train.jsonl'}", f"data.eval_path={data / 'test.jsonl'}"]
        areal_lite(work / f"{run_dir.name}.log", "train", *TRAIN.split(), *ARMS[arm].split(), *own)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == steps, (
        f"{run_dir} was stopped after {summary['steps']} steps: remove it"
    )
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "arm": arm,
        "seed": seed,
        "accuracy_before": summary["sampled_before"],
        "accuracy": summary["sampled_after"],
        "generated": summary["groups"],
        "distinct_correct": metrics[-1].get("replay_distinct_correct"),
        "wall_s": summary["wall_s"],
        "rewards": [round(m["reward_mean"], 4) for m in metrics],
    }


COLORS = {"TB with replay": "#1f6fb4", "TB": "#5aa469", "GRPO": "#d1662b"}


def plot(records: list[dict], path: Path) -> None:
    """Draw one row per share of forgotten carries and one line per seed.

    Left: held-out accuracy before and after. Right: mean reward of the trained trajectories.
    """
    shares = sorted({r["forget"] for r in records})
    figure, rows = plt.subplots(
        len(shares), 2, figsize=(9, 3.4 * len(shares)), layout="constrained", squeeze=False
    )
    for (left, right), forget in zip(rows, shares):
        for place, arm in enumerate(ARMS):
            for number, run in enumerate(
                r for r in records if r["arm"] == arm and r["forget"] == forget
            ):
                left.plot(
                    [place - 0.12, place + 0.12],
                    [run["accuracy_before"], run["accuracy"]],
                    "o-",
                    color=COLORS[arm],
                    alpha=0.8,
                )
                right.plot(
                    run["rewards"],
                    color=COLORS[arm],
                    linewidth=1,
                    alpha=0.8,
                    label=None if number else arm,
                )
        left.set(
            xticks=range(len(ARMS)),
            xticklabels=list(ARMS),
            ylim=(-0.02, 1.02),
            ylabel="held-out accuracy, sampled",
        )
        left.set_title(f"before and after; the teacher forgot {forget:.0%} of the carries")
        right.set(ylim=(-0.02, 1.02), xlabel="step", title="reward of what is trained on")
        right.legend(frameon=False)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
