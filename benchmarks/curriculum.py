"""What it gains to let prompts rest that nothing solves, on two cores without a GPU.

    python benchmarks/curriculum.py    # twenty minutes; continues after a stop

Half of the prompts are sums of three digits, which the model can learn. The answers of the others
are longer than a completion may be, so nothing solves them. Prompts repeat: a run sees each of them
several times. All runs of a seed start from the same model, and make as many steps of as many
trajectories. Held-out problems are sums of three digits.

Writes <out>/curriculum.json, one record per run, and <out>/curriculum.md, the table of means.
"""

import argparse
import json
import statistics
from pathlib import Path

from launch import ROOT, areal_lite, warm_up

from areal_lite_quickstart import addition

EACH = 128  # prompts of each kind
STEPS, BATCH = 40, 32
ARMS = {
    "all prompts alike": "",
    "unsolved ones rest": "rollout.rest_unsolved=8",
    "active sampling": "rollout.filters=[zero_variance]",
    "both": "rollout.filters=[zero_variance] rollout.rest_unsolved=8",
}
FILES = {"path": "train", "eval_path": "test"}
MODEL = ["num_layers=3", "mlp_size=256"]
WARM_UP = (
    "max_digits=3 batch_size=32 forget_carry=0.6 trainer.steps=300 trainer.lr=4e-3 "
    "trainer.min_lr=8e-5 trainer.lr_schedule=cosine trainer.lr_warmup_steps=20"
)
TRAIN = (
    "data.source=jsonl data.chat=false"
    " reward.function=areal_lite_quickstart.addition:addition_reward"
    " rollout.group_size=8 rollout.max_new_tokens=48 rollout.max_concurrent=256"
    f" trainer.steps={STEPS} trainer.batch_groups={BATCH} trainer.lr=1.5e-4 trainer.adam_eps=1e-5"
    " algo=quickstart eval.problems=512"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "curriculum")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    records = []
    for seed in args.seeds:
        warm_up(args.work, seed, MODEL, WARM_UP.split())
        write_prompts(args.work, seed)
        for arm in ARMS:
            records.append(train(args.work, seed, arm))
            print(records[-1], flush=True)
    result = {"settings": TRAIN, "arms": ARMS, "runs": records}
    (args.out / "curriculum.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "curriculum.md").write_text(table(records))
    print(table(records))


def write_prompts(work: Path, seed: int) -> None:
    """Write the prompts to train on and the held-out ones of a seed."""
    three, eight = (0.0, 0.0, 1.0), (*7 * (0.0,), 1.0)

    def lines(split: addition.Split, count: int, weights: tuple[float, ...]) -> list[str]:
        digits = len(weights)
        problems = [
            addition.make_problem(split, i, seed=seed, max_digits=digits, weights=weights)
            for i in range(count)
        ]
        return [
            json.dumps({"question": addition.prompt(p), "answer": addition.answer(p)})
            for p in problems
        ]

    asked = lines("train", EACH, three) + lines("train", EACH, eight)
    (work / f"train-{seed}.jsonl").write_text("\n".join(asked) + "\n")
    (work / f"test-{seed}.jsonl").write_text("\n".join(lines("test", 512, three)) + "\n")


def train(work: Path, seed: int, arm: str) -> dict:
    """Train one run unless it is finished; return its record."""
    run_dir = work / f"{arm.replace(' ', '-')}-{seed}"
    if not (run_dir / "summary.json").exists():
        assert not run_dir.exists(), f"{run_dir} was not finished: remove it"
        own = [f"run_dir={run_dir}", f"model={work / f'warm-{seed}'}"]
        own += [f"seed={seed}"]
        own += [f"data.{kind}={work / name}-{seed}.jsonl" for kind, name in FILES.items()]
        log = work / f"{run_dir.name}.log"
        areal_lite(log, "train", *TRAIN.split(), *ARMS[arm].split(), *own)
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    late = [step for step in steps if step["step"] > STEPS // 2]
    return {
        "arm": arm,
        "seed": seed,
        "accuracy_before": summary["sampled_before"],
        "accuracy": summary["sampled_after"],
        "uniform_groups": statistics.mean(step["uniform_groups_share"] for step in late),
        "groups": sum(summary["groups"].values()),
        "seconds": steps[-1]["logged_at"] - steps[0]["logged_at"],
    }


def table(records: list[dict]) -> str:
    """Return the table of means over the seeds, as Markdown."""
    seeds = len({record["seed"] for record in records})
    lines = [
        "# What it gains to let prompts rest that nothing solves",
        "",
        f"`python benchmarks/curriculum.py`: {STEPS} steps of {BATCH} x 8 trajectories, {EACH}"
        f" prompts that can be learned and {EACH} that cannot, means of {seeds} seeds.",
        "",
        "| setting | accuracy before | after | of each seed "
        "| groups with equal rewards, second half | groups generated | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        own = [record for record in records if record["arm"] == arm]

        def mean(key: str, own: list[dict] = own) -> float:
            return statistics.mean(record[key] for record in own)

        lines.append(
            f"| {arm} | {mean('accuracy_before'):.3f} | {mean('accuracy'):.3f} "
            f"| {', '.join(format(r['accuracy'], '.3f') for r in own)} "
            f"| {mean('uniform_groups'):.0%} | {mean('groups'):.0f} | {mean('seconds'):.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
