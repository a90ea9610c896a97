"""What evaluations during training cost, on two cores without a GPU.

    python benchmarks/evaluations.py    # half an hour; continues after a stop

Every run is `areal-lite train` with two servers, from the same warmed-up model. It never evaluates
during training, evaluates on both servers while pushes change their weights, or evaluates on a
server that keeps its version (`eval.servers=1`). The runs follow each other and take turns.

Writes <out>/evaluations.json, one record per run, and <out>/evaluations.md, the table of medians.
"""

import argparse
import json
import statistics
from pathlib import Path

from launch import ROOT, areal_lite, warm_up

STEPS, EVERY, PROBLEMS = 40, 8, 1024
SETTINGS = {
    "never": "eval.every=0",
    "shared": f"eval.every={EVERY}",
    "own": f"eval.every={EVERY} eval.servers=1",
}
LABELS = {
    "never": "never",
    "shared": f"every {EVERY} steps, on both servers",
    "own": f"every {EVERY} steps, on a server of its own",
}
MODEL = ["num_layers=3", "mlp_size=256"]
WARM_UP = (
    "max_digits=4 batch_size=32 forget_carry=0.5 trainer.steps=300 trainer.lr=4e-3 "
    "trainer.min_lr=8e-5 trainer.lr_schedule=cosine trainer.lr_warmup_steps=20"
)
TRAIN = (
    "+task=addition data.args.max_digits=4 "
    "rollout.group_size=8 rollout.max_new_tokens=96 rollout.max_concurrent=256 "
    "trainer.batch_groups=32 trainer.lr=1e-4 trainer.adam_eps=1e-5 algo=quickstart "
    f"server.count=2 trainer.steps={STEPS} eval.problems={PROBLEMS}"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "evaluations")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warm_up(args.work, 1, MODEL, WARM_UP.split())
    records = []
    for number in range(args.rounds):
        for name in SETTINGS:
            records.append(train(args.work, name, number))
            print(records[-1], flush=True)
    result = {"settings": TRAIN, "runs": records}
    (args.out / "evaluations.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "evaluations.md").write_text(table(records))
    print(table(records))


def train(work: Path, name: str, number: int) -> dict:
    """Train one run unless it is finished; return its record."""
    run_dir = work / f"{name}-{number}"
    if not (run_dir / "summary.json").exists():
        assert not run_dir.exists(), f"{run_dir} was not finished: remove it"
        own = [f"run_dir={run_dir}", f"model={work / 'warm-1'}"]
        own += [f"seed={number}"]
        log = work / f"{run_dir.name}.log"
        areal_lite(log, "train", *TRAIN.split(), *SETTINGS[name].split(), *own)
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
    # The first and the last evaluation are before and after training.
    during = [record for record in evals if 0 < record["version"] < STEPS]
    # The first step waits for the servers.
    counted = [step for step in steps if step["step"] > 1]
    seconds = steps[-1]["logged_at"] - steps[0]["logged_at"]
    return {
        "evaluations": name,
        "round": number,
        "seconds": round(seconds, 2),
        "trajectories_per_s": round(sum(s["trajectories"] for s in counted) / seconds, 1),
        "evaluation_seconds": [round(record["seconds"], 2) for record in during],
        "versions": [record["versions"] for record in during],
    }


def table(records: list[dict]) -> str:
    """Return the table of medians over the runs, as Markdown."""

    def of(name: str) -> list[dict]:
        return [record for record in records if record["evaluations"] == name]

    rounds = len(of("never"))
    lines = [
        f"`python benchmarks/evaluations.py`: {STEPS} steps of 32 x 8 trajectories on two servers,"
        f" {PROBLEMS:,} problems in an evaluation, medians of {rounds} runs.",
        "",
        "| evaluations | trajectories/s | lowest and highest | of those without evaluations "
        "| seconds of an evaluation | versions that answered one |",
        "|---|---|---|---|---|---|",
    ]
    fastest = statistics.median(r["trajectories_per_s"] for r in of("never"))
    for name, label in LABELS.items():
        speeds = [r["trajectories_per_s"] for r in of(name)]
        seconds = [value for r in of(name) for value in r["evaluation_seconds"]]
        versions = [len(found) for r in of(name) for found in r["versions"]]
        speed = statistics.median(speeds)
        last = "– | –"
        if seconds:
            few, many = min(versions), max(versions)
            last = (
                f"{statistics.median(seconds):.1f} | {few if few == many else f'{few} to {many}'}"
            )
        lines.append(
            f"| {label} | {speed:.0f} | {min(speeds):.0f}, {max(speeds):.0f} "
            f"| {speed / fastest:.2f} | {last} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
