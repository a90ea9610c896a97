"""Accuracy and time of synchronous and asynchronous schedules on answers with a long tail.

    python -m benchmarks.schedules    # 15 minutes a seed on two cores; continues after a stop

Every run is `areal-lite train`, from the same warmed-up model, with real SGLang servers and a real
Megatron trainer. The task is `long_tail` of benchmarks/against_trl. The runs follow each other, so
that each has the machine for itself. The schedules take turns within a seed.

The schedules are a ladder. Each changes one thing. `one_step` also divides the cores anew.

* `static`: synchronous. The 512 answers of a step come in two batches of 256, and the second begins
  when the longest answer of the first has ended.
* `sync`: continuous batching with 384 in flight. Another answer begins as soon as one ends.
* `one_step`: the next batch is generated while this one is trained on.
* `one_step_in_place`: a push no longer waits until the running answers have ended.
* `async`: the bound on staleness is 4 steps in place of 1.
* `async_every_2`: a push after every second step.

Each schedule has both cores. In `static` and `sync`, two servers generate, and then two ranks
train: a second thread makes neither faster with this small model. In the others, one server
generates while one rank trains.

Writes <out>/schedules.json, one record per run, and <out>/schedules.md, the table over the seeds.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np

from benchmarks.against_trl.tasks import LONG_TAIL, warm_model, write_prompts
from benchmarks.launch import ROLES, ROOT, RoleTimes, areal_lite

CORES = os.cpu_count() or 1
_SYNC = "schedule=sync server.count=2 trainer.data_parallel=2"
SCHEDULES = {
    "static": f"{_SYNC} rollout.max_concurrent=256 rollout.workflow_args={{size:256}} "
    "rollout.workflow=benchmarks.static_batches:StaticBatches",
    "sync": _SYNC,
    "one_step": "schedule=one_step",
    "one_step_in_place": "schedule=one_step rollout.interrupt=in_place",
    "async": "schedule=async",
    "async_every_2": "schedule=async sync.every=2",
}
TRAIN = (
    f"data.source=jsonl data.chat=false reward.function={LONG_TAIL.reward} "
    "rollout.group_size=8 rollout.max_concurrent=384 "
    f"rollout.max_new_tokens={LONG_TAIL.max_new_tokens} "
    "trainer.batch_groups=64 trainer.lr=3e-4 trainer.min_lr=3e-5 trainer.lr_schedule=linear "
    "trainer.lr_warmup_steps=5 trainer.adam_eps=1e-5 algo=quickstart "
    "eval.problems=512"
)
PARTS = {"wait_s": "wait_s", "update_s": "train_s", "push_s": "push_s"}
"""The parts of a step: their names here, and in metrics.jsonl."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "schedules", help="run directories"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    records = []
    for seed in args.seeds:
        warm_model(LONG_TAIL, args.work, seed)
        write_prompts(LONG_TAIL, args.work, seed)
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
            f"data.path={work / f'{LONG_TAIL.name}-train-{seed}.jsonl'}",
            f"data.eval_path={work / f'{LONG_TAIL.name}-test-{seed}.jsonl'}",
            f"seed={seed}",
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
        **{key: sum(m[name] for m in metrics[1:]) for key, name in PARTS.items()},
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
    """Return the page: accuracies, times and speeds, and the processor time of each role."""
    of = {name: [r for r in records if r["schedule"] == name] for name in SCHEDULES}
    seeds = ", ".join(str(record["seed"]) for record in of["sync"])
    lines = [
        f"`python -m benchmarks.schedules --seeds {seeds.replace(',', '')}`: {steps} steps of"
        " 64 x 8 trajectories. The answers have 15 to 171 tokens. Means over the seeds; times and"
        " ratios also with the lowest and the highest. The first step is left out of the times.",
        "",
        "| schedule | accuracy before | after | greedy | staleness, mean | steps, s "
        "| of these waiting | updating | pushing | speed against sync | against the row above |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    above = of["static"]
    for name, own in of.items():
        before, after, greedy = (
            f"{_mean(own, key):.3f}" for key in ("accuracy_before", "accuracy", "greedy")
        )
        seconds = [r["after_first_step_s"] for r in own]
        parts = (f"{_mean(own, key):.0f}" for key in ("wait_s", "update_s", "push_s"))
        ratios = (_spread(_speeds(own, other), 2) for other in (of["sync"], above))
        lines.append(
            f"| {name} | {before} | {after} | {greedy} | {_mean(own, 'staleness_mean'):.1f} "
            f"| {_spread(seconds, 0)} | {' | '.join(parts)} | {' | '.join(ratios)} |"
        )
        above = own
    return "\n".join([*lines, "", *role_table(records)]) + "\n"


def _speeds(own: list[dict], others: list[dict]) -> list[float]:
    """Return the speed of each run relative to that of the other schedule with its seed."""
    return [
        other["after_first_step_s"] / record["after_first_step_s"]
        for other, record in zip(others, own, strict=True)
    ]


def _mean(records: list[dict], key: str) -> float:
    return float(np.mean([record[key] for record in records]))


def _spread(values: list[float], digits: int) -> str:
    """Return the mean of some values, their lowest and their highest."""
    mean, lowest, highest = (
        f"{value:.{digits}f}" for value in (np.mean(values), min(values), max(values))
    )
    return f"{mean} ({lowest} to {highest})"


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
