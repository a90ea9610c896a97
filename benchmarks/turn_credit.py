"""Credit for turns against a reward at the end, on a task of six turns; counted in updates.

    python -m benchmarks.turn_credit [--seeds 1 2 3 4 5] [--steps 150] [--groups 2]
                                     [--task share] [--arms outcome turns]

The environment shows one of four letters, and the policy answers with one token. It is right if
the token belongs to the letter's quarter of the characters. After six turns the reward of the task
`share` is the share of right answers. `most` gives 1 for four right answers or more and otherwise
0, and `all` gives 1 for six.

`outcome` gets this reward alone. `turns` also learns which answer was right, and `noise` is told at
random. All begin with the same random model of a seed, and see the same prompts. An update has
`--groups` of them, with four episodes each.

Writes results/turn_credit.json and prints the updates until a mean reward of 0.5 and of 0.9, over
five steps.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory
from benchmarks.launch import ROOT, areal_lite, make_model

RESULTS = Path(__file__).with_name("results") / "turn_credit.json"
LETTERS, TURNS, PROMPTS = "abcd", 6, 64
WINDOW = 5
TASKS: dict[str, Callable[[list[bool]], float]] = {
    "share": mean,
    "most": lambda right: float(sum(right) >= 4),
    "all": lambda right: float(all(right)),
}
THRESHOLDS = (0.5, 0.9)
TRAIN = (
    "schedule=sync data.source=jsonl data.chat=false data.max_prompt_tokens=8"
    " reward.function=areal_lite.rewards.exact:exact_reward"
    " rollout.group_size=4 rollout.max_new_tokens=24 eval.problems=0"
    " trainer.lr=3e-4 trainer.lr_schedule=constant trainer.adam_eps=1e-5 algo=grpo algo.kl.coef=0"
)
ARMS = {
    "outcome": ("exact", "algo.advantage.credit=outcome"),
    "turns": ("exact", "algo.advantage.credit=turns algo.advantage.gamma=0"),
    "turns, return": ("exact", "algo.advantage.credit=turns"),
    "noise, return": ("noise", "algo.advantage.credit=turns"),
}


class SixTurns:
    """Show a letter of the prompt's answer in each turn, and judge the token that follows."""

    def __init__(self, scores: str, task: str):
        self._scores, self._reward = scores, TASKS[task]

    async def __call__(self, episode: Episode) -> Trajectory:
        transcript, right = Transcript(episode), []
        for number, letter in enumerate(episode.prompt.answer):
            if number:
                transcript.add_tokens(episode.tokenizer.encode(f"\n{letter}"))
            text = await transcript.sample_text(max_new_tokens=1)
            right.append(len(text) == 1 and ord(text) % len(LETTERS) == LETTERS.index(letter))
            told = right[-1] if self._scores == "exact" else random.random() < 0.5
            transcript.credit(told / TURNS)
        return transcript.trajectory(self._reward(right))


def run(work: Path, seed: int, arm: str, steps: int, groups: int, task: str) -> dict:
    """Train one run; return the mean reward of each step."""
    scores, settings = ARMS[arm]
    run_dir = work / f"{arm.replace(', ', '-')}-{task}-{groups}-{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    areal_lite(
        work / f"{run_dir.name}.log",
        "train",
        *[f"run_dir={run_dir}", f"model={work / f'model-{seed}'}", f"seed={seed}"],
        *[f"data.path={work / 'prompts.jsonl'}", f"trainer.steps={steps}", *TRAIN.split()],
        f"trainer.batch_groups={groups}",
        "rollout.workflow=benchmarks.turn_credit:SixTurns",
        *[f"rollout.workflow_args.scores={scores}", f"rollout.workflow_args.task={task}"],
        *settings.split(),
    )
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rewards = [round(json.loads(line)["reward_mean"], 4) for line in lines]
    return {"arm": arm, "seed": seed, "groups": groups, "task": task, "rewards": rewards}


def updates_to(rewards: list[float], threshold: float) -> int | None:
    """Return the first step whose last five have at least this mean reward; None without one."""
    windows = (mean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1))
    return next((n for n, value in enumerate(windows, WINDOW) if value >= threshold), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--task", default="share", choices=list(TASKS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "turn_credit")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    rows = []
    for _ in range(PROMPTS):
        letters = "".join(rng.choices(LETTERS, k=TURNS))
        rows.append(json.dumps({"question": f"\n{letters[0]}", "answer": letters}))
    (args.work / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for seed in args.seeds:
        make_model(args.work / f"model-{seed}", seed)
        for arm in args.arms:
            record = run(args.work, seed, arm, args.steps, args.groups, args.task)
            same = ("arm", "seed", "groups", "task")
            others = [r for r in found if any(r[key] != record[key] for key in same)]
            found = [*others, record]
            RESULTS.write_text(json.dumps(found) + "\n")
            reached = [updates_to(record["rewards"], threshold) for threshold in THRESHOLDS]
            print(f"seed {seed}, {arm}: 0.5 and 0.9 after {reached} updates", flush=True)


if __name__ == "__main__":
    main()
