"""Does a real chat model learn in environments that others made?

    pip install reasoning-gym textarena
    CHAT_MODEL=FOLDER python -m benchmarks.environments [--tasks problems game] [--seeds 1 2 3]

`problems` has the tasks of examples/environment: sums of two digits and greatest common divisors,
made and scored by reasoning-gym. `game` is examples/game: TextArena's GuessTheNumber with a number
from 1 to 10 and at most four guesses, where only a game that is won pays. The model is
SmolLM2-135M-Instruct. A finished run is not repeated. Writes results/environments.{json,md,png}.
"""

import argparse
import json
import os
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.launch import ROOT, areal_lite

RESULTS = ROOT / "benchmarks" / "results"
WINDOW = 3  # steps of a running mean
STEPS = {"problems": 12, "game": 16}
COMMON = (
    "rollout.group_size=8 trainer.batch_groups=8 trainer.lr=2e-5 trainer.lr_schedule=constant"
    " data.args.held_out=64 eval.problems=64 reward.workers=1"
)
TASKS = {
    "problems": [
        "+task=reasoning_gym",
        "data.args.tasks={chain_sum: {min_terms: 2, max_terms: 2, max_digits: 1}, "
        "gcd: {max_value: 30}}",
        "data.system_prompt=null",
        "reward.function=examples.environment.my_reward:last_number",
        "rollout.max_new_tokens=24",
    ],
    "game": [
        "+task=games",
        "data.args.game=textarena:GuessTheNumber-v0",
        "data.system_prompt='Answer with one guess in square brackets, such as [7].'",
        "data.args.arguments={min_number: 1, max_number: 10, max_turns: 4}",
        "rollout.workflow=examples.game.my_game:Win",
        "rollout.workflow_args={max_turns: 5, max_answer_tokens: 8}",
        "rollout.max_new_tokens=128",
        "rollout.stop=[']']",
    ],
}


def train(work: Path, task: str, seed: int) -> dict:
    """Train one run unless it is finished; return its record."""
    run_dir = work / f"{task}-{seed}"
    if not (run_dir / "summary.json").exists():
        own = [f"model={os.environ['CHAT_MODEL']}", f"run_dir={run_dir}", f"seed={seed}"]
        own += [f"trainer.steps={STEPS[task]}", *COMMON.split(), *TASKS[task]]
        areal_lite(work / f"{run_dir.name}.log", "train", *own)
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "task": task,
        "seed": seed,
        "rewards": [round(row["reward_mean"], 4) for row in rows],
        "greedy": [summary["greedy_before"], summary["greedy_after"]],
        "sampled": [summary["sampled_before"], summary["sampled_after"]],
        "seconds": round(rows[-1]["logged_at"] - rows[0]["logged_at"] + rows[0]["time_s"]),
    }


def table(records: list[dict]) -> str:
    """Return the table of all runs, as Markdown."""
    lines = [
        "`python -m benchmarks.environments`: SmolLM2-135M-Instruct on two cores, 64 trajectories a"
        " step; other programs used the cores during `game`, too. A game is worth 1 if it is won,"
        " else 0; four guesses at random win 4 of 10. Rewards are means of the first and the last"
        f" {WINDOW} steps, and the others are mean rewards of 64 held-out problems, before and"
        " after.",
        "",
        "| task | seed | steps | minutes | reward | greedy | sampled |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        rewards = record["rewards"]
        pairs = [
            (mean(rewards[:WINDOW]), mean(rewards[-WINDOW:])),
            record["greedy"],
            record["sampled"],
        ]
        cells = [record["task"], str(record["seed"]), str(len(rewards))]
        cells += [f"{record['seconds'] / 60:.0f}", *(f"{a:.2f} → {b:.2f}" for a, b in pairs)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "![Reward of each run by step](environments.png)", ""])


def plot(records: list[dict], path: Path) -> None:
    """Draw the reward of each run by step, a panel for each task."""
    tasks = list(dict.fromkeys(record["task"] for record in records))
    size = (4.5 * len(tasks), 3.5)
    figure, panels = plt.subplots(1, len(tasks), figsize=size, layout="constrained", squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        for record in records:
            if record["task"] == task:
                means = np.convolve(record["rewards"], np.ones(WINDOW) / WINDOW, "valid")
                steps = range(WINDOW, WINDOW + len(means))
                axes.plot(steps, means, label=f"seed {record['seed']}")
        axes.set(title=task, xlabel="step", ylim=(0, 1))
        axes.set_ylabel(f"mean reward of {WINDOW} steps")
        axes.legend(frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "environments")
    args = parser.parse_args()
    records = []
    for task in args.tasks:
        for seed in args.seeds:
            records.append(train(args.work, task, seed))
            print(json.dumps(records[-1]), flush=True)
    (RESULTS / "environments.json").write_text(json.dumps(records, indent=1) + "\n")
    (RESULTS / "environments.md").write_text(table(records))
    plot(records, RESULTS / "environments.png")
    print(table(records))


if __name__ == "__main__":
    main()
