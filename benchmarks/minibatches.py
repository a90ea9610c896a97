"""Compare one, two and four updates a batch, on a toy and a chat model.

    python -m benchmarks.minibatches [--tasks short chat] [--seeds 1 2 3] [--steps 30]

With one update a batch the clip of decoupled PPO cannot act: the policy is the proximal one. With
more, the same batch is used for more updates, at proximal log-probs that are computed before the
first one, which costs a forward pass over what the later updates train on. All runs have the same
batches, learning rate and clip range, and follow each other.

The tasks are those of benchmarks/against_trl: `short`, a toy, with 64 groups of 8 a step, and
`chat`, SmolLM2-135M-Instruct (the folder CHAT_MODEL), with 8 groups of 8. Writes
results/minibatches.json and prints a table.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import mean

from benchmarks.against_trl.tasks import CHAT, TASKS, Task, warm_model, write_prompts
from benchmarks.launch import ROOT, areal_lite
from benchmarks.staleness.paired import steps_to

RESULTS = Path(__file__).with_name("results") / "minibatches.json"
MINIBATCHES = (1, 2, 4)
RATES = {"short": 3e-4, "long_tail": 3e-4, "chat": 1e-5}
WINDOW = 3  # steps of a mean reward


def run(work: Path, task: Task, seed: int, minibatches: int, steps: int) -> dict:
    """Train with so many updates a batch; return seconds, rewards and clip fractions by step."""
    model, files = warm_model(task, work, seed), write_prompts(task, work, seed)
    run_dir = work / f"minibatches-{task.name}-{minibatches}-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    areal_lite(
        work / f"{run_dir.name}.log",
        "train",
        *[f"run_dir={run_dir}", f"model={model}", f"seed={seed}", "algo=quickstart"],
        *["data.source=jsonl", f"data.path={files[0]}", f"data.eval_path={files[1]}"],
        *[f"data.chat={str(task.chat).lower()}", f"reward.function={task.reward}"],
        *["eval.problems=0", f"trainer.batch_groups={task.groups}", "rollout.group_size=8"],
        f"rollout.max_new_tokens={task.max_new_tokens}",
        *[f"trainer.minibatches={minibatches}", f"trainer.steps={steps}"],
        *[f"trainer.lr={RATES[task.name]}", "trainer.lr_schedule=constant"],
        f"trainer.adam_eps={task.adam_eps}",
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    started = rows[0]["logged_at"] - rows[0]["time_s"]
    return {
        "task": task.name,
        "seed": seed,
        "minibatches": minibatches,
        "seconds": [round(row["logged_at"] - started, 2) for row in rows],
        "rewards": [round(row["reward_mean"], 4) for row in rows],
        "clipped": round(mean(row["clip_fraction"] for row in rows), 5),
    }


def line(record: dict) -> str:
    """Return one run as a row of a table."""
    cells = [record["task"], str(record["minibatches"]), str(record["seed"])]
    for threshold in TASKS[record["task"]].thresholds:
        step = steps_to(record["rewards"], threshold, WINDOW)
        reached = "never" if step is None else f"{record['seconds'][step - 1]:.0f} s, step {step}"
        cells.append(reached)
    half = len(record["rewards"]) // 2
    cells.append(f"{mean(record['rewards'][half:]):.3f}")
    seconds = record["seconds"]
    cells.append(f"{(seconds[-1] - seconds[1]) / (len(seconds) - 2):.2f}")
    cells.append(f"{record['clipped']:.4f}")
    return f"| {' | '.join(cells)} |"


HEAD = """| task | minibatches | seed | to the first reward | to the second | mean reward of the \
second half | seconds a step | share of tokens clipped |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=["short", CHAT.name])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "minibatches")
    args = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    print(HEAD)
    for task in map(TASKS.__getitem__, args.tasks):
        for seed in args.seeds:
            for minibatches in MINIBATCHES:
                record = run(args.work / task.name, task, seed, minibatches, args.steps)
                key = ("task", "seed", "minibatches")
                found = [r for r in found if any(r[k] != record[k] for k in key)] + [record]
                print(line(record), flush=True)
                RESULTS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
