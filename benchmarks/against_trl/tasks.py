"""The tasks: sums whose answers are all about as long, and sums whose answers have a long tail."""

import json
from dataclasses import dataclass
from pathlib import Path

from areal_lite.quickstart import addition
from benchmarks.launch import warm_up

MODEL = ["num_layers=3", "mlp_size=256"]
WARM_UP = (
    "batch_size=32 forget_carry=0.5 trainer.lr=4e-3 trainer.min_lr=8e-5"
    " trainer.lr_schedule=cosine trainer.lr_warmup_steps=20 trainer.weight_decay=0.01"
)
_TRAIN, _HELD_OUT = 8192, 512


@dataclass(frozen=True)
class Task:
    """Sums of some lengths. `weights` are those of the digit counts, from one digit on.

    `own_steps`: how many steps areal_lite makes for one of TRL's, so that both train for as long.
    """

    name: str
    weights: tuple[float, ...]
    max_new_tokens: int
    warm_up_steps: int
    own_steps: int = 1

    @property
    def max_digits(self) -> int:
        return len(self.weights)


SHORT = Task("short", (0.0, 0.0, 1.0), max_new_tokens=64, warm_up_steps=400)
LONG_TAIL = Task(
    "long_tail",
    tuple(0.7**d for d in range(12)),
    max_new_tokens=192,
    warm_up_steps=700,
    own_steps=4,
)
TASKS = (SHORT, LONG_TAIL)
"""short: three digits, answers of 43 to 45 tokens. long_tail: 1 to 12 digits, 15 to 171 tokens."""


def warm_model(task: Task, work: Path, seed: int) -> Path:
    """Return <work>/warm-<seed>, a model that has seen sums of the task. Make it if needed."""
    settings = f"max_digits={task.max_digits} trainer.steps={task.warm_up_steps} {WARM_UP}"
    return warm_up(work, seed, MODEL, settings.split())


def write_prompts(task: Task, folder: Path, seed: int) -> tuple[Path, Path]:
    """Write the prompts to train on and those held out as JSONL, and return both files."""
    files = folder / f"{task.name}-train-{seed}.jsonl", folder / f"{task.name}-test-{seed}.jsonl"
    for path, split, count in zip(files, ("train", "test"), (_TRAIN, _HELD_OUT), strict=True):
        problems = (
            addition.make_problem(
                split, i, seed=seed, max_digits=task.max_digits, weights=task.weights
            )
            for i in range(count)
        )
        lines = [
            json.dumps({"question": addition.prompt(p), "answer": addition.answer(p)})
            for p in problems
        ]
        path.write_text("\n".join(lines) + "\n")
    return files
