"""Does a real chat model learn in environments that others made?

    pip install reasoning-gym textarena
    CHAT_MODEL=FOLDER python -m benchmarks.environments [--tasks problems game] [--seeds 1 2 3]

`problems` has the tasks of examples/environment: sums of two digits and greatest common divisors,
made and scored by reasoning-gym. `game` is TextArena's GuessTheNumber: a number from 1 to 20,
at most six guesses, and the answers higher or lower. TextArena pays 1 for the number, and otherwise
for how close the last guess was. The model is SmolLM2-135M-Instruct. A finished run is not
repeated. Writes results/environments.{json,md,png}.
"""

import argparse
import json
import os
from contextlib import closing
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from areal_lite.run_dir.reader import RunReader
from benchmarks.launch import ROOT, areal_lite

RESULTS = ROOT / "benchmarks" / "results"
WINDOW = 3  # steps of a running mean
COMMON = (
    "rollout.group_size=8 trainer.lr=2e-5 trainer.lr_schedule=constant"
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
        "trainer.batch_groups=8",
    ],
    "game": [
        "+task=games",
        "data.args.game=textarena:GuessTheNumber-v0",
        "data.system_prompt='Answer with one guess in square brackets, such as [7].'",
        "rollout.workflow_args={max_turns: 6, max_answer_tokens: 10}",
        "rollout.max_new_tokens=128",
        "rollout.stop=[']']",
        "trainer.batch_groups=4",
    ],
}


def train(work: Path, task: str, seed: int, steps: int) -> dict:
    """Train one run unless it is finished; return its record."""
    run_dir = work / f"{task}-{seed}"
    if not (run_dir / "summary.json").exists():
        own = [f"model={os.environ['CHAT_MODEL']}", f"run_dir={run_dir}", f"seed={seed}"]
        own += [f"trainer.steps={steps}", *COMMON.split(), *TASKS[task]]
        areal_lite(work / f"{run_dir.name}.log", "train", *own)
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "task": task,
        "seed": seed,
        "rewards": [round(row["reward_mean"], 4) for row in rows],
        "greedy": [summary["greedy_before"], summary["greedy_after"]],
        "sampled": [summary["sampled_before"], summary["sampled_after"]],
        "solved": solved(run_dir),
        "seconds": round(rows[-1]["logged_at"] - rows[0]["logged_at"] + rows[0]["time_s"]),
    }


def solved(run_dir: Path) -> list[float]:
    """Return the share of trajectories with the whole reward in the first and the last quarter."""
    with closing(RunReader(run_dir / "trajectories.sqlite")) as reader:
        whole = [(row["reward"] or 0.0) >= 1 for row in reader.trajectories()]
    quarter = len(whole) // 4
    return [round(mean(part), 4) for part in (whole[:quarter], whole[-quarter:])]


def table(records: list[dict]) -> str:
    """Return the table of all runs, as Markdown."""
    lines = [
        "`python -m benchmarks.environments`: SmolLM2-135M-Instruct on two cores, 64 trajectories a"
        " step for `problems` and 32 for `game`. Rewards are means of the first and the last"
        f" {WINDOW} steps, `solved` is the share of trajectories with the whole reward in the first"
        " and the last quarter of them, and the others are mean rewards of 64 held-out problems,"
        " before and after.",
        "",
        "| task | seed | steps | minutes | reward | solved | greedy | sampled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        rewards = record["rewards"]
        pairs = [
            (mean(rewards[:WINDOW]), mean(rewards[-WINDOW:])),
            record["solved"],
            record["greedy"],
            record["sampled"],
        ]
        cells = [record["task"], str(record["seed"]), str(len(rewards))]
        cells += [f"{record['seconds'] / 60:.0f}", *(f"{a:.2f} → {b:.2f}" for a, b in pairs)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "TextArena pays for the last guess of a game that two invalid answers end, too. The model"
        " learns to guess a number in the middle and to stop: the reward rises, and it wins no more"
        " often. Its greedy answers did so before.",
    ]
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
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "environments")
    args = parser.parse_args()
    records = []
    for task in args.tasks:
        for seed in args.seeds:
            records.append(train(args.work, task, seed, args.steps))
            print(json.dumps(records[-1]), flush=True)
    (RESULTS / "environments.json").write_text(json.dumps(records, indent=1) + "\n")
    (RESULTS / "environments.md").write_text(table(records))
    plot(records, RESULTS / "environments.png")
    print(table(records))


if __name__ == "__main__":
    main()
