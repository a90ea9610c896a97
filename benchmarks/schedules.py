"""Accuracy and time of `sync`, `one_step` and `async` on the same task, seed and steps.

    python benchmarks/schedules.py    # 20 minutes on two cores; continues after a stop

Every run is `areal-lite train` with the settings of the quickstart, from the same warmed-up model,
with a real SGLang server and a real Megatron trainer. The runs follow each other, so that each has
the machine for itself. The schedules take turns within a seed. In `async_prefill_at_once`, servers
prefill new requests before the next decode step, as SGLang does by default. Without a GPU, ours
wait for a few decode steps.

Writes <out>/schedules.json, one record per run, and <out>/schedules.md, the table of means over the
seeds.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
from launch import ROLES, ROOT, RoleTimes, areal_lite, warm_up

CORES = os.cpu_count() or 1
SCHEDULES = {
    "sync": "schedule=sync",
    "one_step": "schedule=one_step",
    "async": "schedule=async",
    "async_prefill_at_once": "schedule=async server.args={prefill_decode_interval:0}",
}
DIGITS = "data.max_digits=8"
MODEL = ["num_layers=3", "mlp_size=256"]
WARM_UP = (
    f"{DIGITS} batch_size=32 forget_carry=0.4 "
    "trainer.steps=500 trainer.lr=4e-3 trainer.min_lr=8e-5 trainer.lr_schedule=cosine"
)
WARM_UP += " trainer.lr_warmup_steps=20 trainer.weight_decay=0.01 trainer.threads=2"
TRAIN = (
    f"{DIGITS} rollout.group_size=8 rollout.max_new_tokens=192 rollout.max_concurrent=384 "
    "trainer.batch_groups=64 trainer.lr=3e-4 trainer.min_lr=3e-5 "
    "trainer.lr_schedule=linear trainer.lr_warmup_steps=5 trainer.adam_eps=1e-5"
)
TRAIN += " algo=quickstart algo.prox=reuse eval.problems=512"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "schedules", help="run directories"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    records = []
    for seed in args.seeds:
        warm_up(args.work, seed, MODEL, WARM_UP.split())
        for schedule in SCHEDULES:
            records.append(train(args.work, seed, schedule, args.steps))
            print({k: v for k, v in records[-1].items() if k != "rewards"}, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "schedules.json").write_text(
        json.dumps({"settings": TRAIN, "steps": args.steps, "runs": records}, indent=1) + "\n"
    )
    (args.out / "schedules.md").write_text(table(records, args.steps))
    print(table(records, args.steps))


def train(work: Path, seed: int, schedule: str, steps: int) -> dict:
    """Train one run unless it is finished; return its record."""
    run_dir = work / f"{schedule}-{seed}"
    if not (run_dir / "summary.json").exists():
        assert not run_dir.exists(), f"{run_dir} was not finished: remove it"
        own = [
            f"run_dir={run_dir}",
            f"model={work / f'warm-{seed}'}",
            f"seed={seed}",
            f"data.seed={seed}",
            f"trainer.steps={steps}",
        ]
        times = areal_lite(
            work / f"{run_dir.name}.log",
            "train",
            *TRAIN.split(),
            *SCHEDULES[schedule].split(),
            *own,
        )
        (run_dir / "cpu_s.json").write_text(json.dumps(_cpu_s(times, read_metrics(run_dir))))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == steps, (
        f"{run_dir} was stopped after {summary['steps']} steps: remove it"
    )
    metrics = read_metrics(run_dir)
    return {
        "schedule": schedule,
        "seed": seed,
        "accuracy_before": summary["sampled_before"],
        "accuracy": summary["sampled_after"],
        "greedy": summary["greedy_after"],
        "train_s": sum(m["time_s"] for m in metrics),
        "wait_s": sum(m["wait_s"] for m in metrics),
        "update_s": sum(m["train_s"] for m in metrics),
        "push_s": sum(m["push_s"] for m in metrics),
        "staleness_mean": float(np.mean([m["staleness_mean"] for m in metrics])),
        "drained": summary["requests_drained"],
        "after_first_step_s": metrics[-1]["logged_at"] - metrics[0]["logged_at"],
        "cpu_s": json.loads((run_dir / "cpu_s.json").read_text()),
        "rewards": [round(m["reward_mean"], 4) for m in metrics],
    }


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _cpu_s(times: RoleTimes, metrics: list[dict]) -> dict[str, float]:
    """Return the CPU seconds of each role between the ends of the first and the last step."""
    spent = times.between(metrics[0]["logged_at"], metrics[-1]["logged_at"])
    return {role: round(seconds, 1) for role, seconds in spent.items()}


def table(records: list[dict], steps: int) -> str:
    def mean(schedule: str, key: str) -> float:
        return float(np.mean([r[key] for r in records if r["schedule"] == schedule]))

    seeds = len(records) // len(SCHEDULES)
    lines = [
        f"`python benchmarks/schedules.py`: {steps} steps of 64 x 8 trajectories, "
        f"sums of eight digits, {seeds} seed{'s' * (seeds > 1)}.",
        "",
        "| schedule | accuracy before | accuracy sampled | greedy | staleness, mean "
        "| all steps, s | of these waiting for batches | updating | pushing | against sync |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for schedule in SCHEDULES:
        before, after, greedy = (
            f"{mean(schedule, key):.3f}" for key in ("accuracy_before", "accuracy", "greedy")
        )
        seconds = [mean(schedule, key) for key in ("train_s", "wait_s", "update_s", "push_s")]
        lines.append(
            f"| {schedule} | {before} | {after} | {greedy} "
            f"| {mean(schedule, 'staleness_mean'):.1f} "
            f"| {' | '.join(f'{value:.0f}' for value in seconds)} "
            f"| {mean('sync', 'train_s') / seconds[0]:.2f} x |"
        )
    return "\n".join([*lines, "", *role_table(records)]) + "\n"


def role_table(records: list[dict]) -> list[str]:
    """Return the table of processor times: what is left of the machine, and what bounds a run."""
    roles = [
        role for role in (*ROLES.values(), "others") if any(role in r["cpu_s"] for r in records)
    ]
    lines = [
        "Processor time after the first step, in seconds. If the cores shared it without a gap,"
        " the steps would take the time in the last column.",
        "",
        f"| schedule | {' | '.join(roles)} | in all | of {CORES} cores | steps, s | at least, s |",
        "|---" * (len(roles) + 5) + "|",
    ]
    for schedule in SCHEDULES:
        own = [record for record in records if record["schedule"] == schedule]
        spent = [float(np.mean([r["cpu_s"].get(role, 0.0) for r in own])) for role in roles]
        wall = float(np.mean([r["after_first_step_s"] for r in own]))
        lines.append(
            f"| {schedule} | {' | '.join(f'{value:.0f}' for value in spent)} | {sum(spent):.0f} "
            f"| {sum(spent) / wall / CORES:.0%} | {wall:.0f} | {sum(spent) / CORES:.0f} |"
        )
    return lines


if __name__ == "__main__":
    main()
