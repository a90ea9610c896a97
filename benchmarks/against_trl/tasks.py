"""The tasks: sums of a toy, answers of equal or long-tailed lengths, and of a chat model."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_lite_quickstart import addition
from benchmarks.launch import ROOT, warm_up

MODEL = ["num_layers=3", "mlp_size=256"]
WARM_UP = (
    "batch_size=32 forget_carry=0.5 trainer.lr=4e-3 trainer.min_lr=8e-5"
    " trainer.lr_schedule=cosine trainer.lr_warmup_steps=20 trainer.weight_decay=0.01"
)
_TRAIN, _HELD_OUT = 8192, 512
EXAMPLE = ROOT / "examples" / "chat_model"


@dataclass(frozen=True, kw_only=True)
class Task:
    """Sums. A step is `groups` x 8 trajectories in `minibatches` updates, at a constant rate.

    `own_steps`: how many steps areal_lite makes for one of TRL's, so that both train for as long.
    """

    name: str
    max_new_tokens: int
    own_steps: int = 1
    groups: int = 64
    minibatches: int = 4
    adam_eps: float = 1e-5
    rates: dict[str, tuple[float, ...]] = field(
        # Fresh data bears a larger learning rate.
        default_factory=lambda: {"areal_lite": (1.5e-4, 3e-4), "trl": (3e-4, 6e-4)}
    )
    rate_steps: int = 15
    thresholds: tuple[float, ...] = (0.9, 0.95)
    micro_batches: tuple[int, ...] = (32, 64, 128)
    # A toy is warmed up on sums: the weights of their digit counts, from one digit on.
    weights: tuple[float, ...] = ()
    warm_up_steps: int = 0

    @property
    def chat(self) -> bool:
        return not self.weights

    @property
    def max_digits(self) -> int:
        return len(self.weights)

    @property
    def reward(self) -> str:
        if self.chat:
            return "examples.chat_model.my_reward:last_number"
        return "areal_lite_quickstart.addition:addition_reward"

    @property
    def common(self) -> dict[str, Any]:
        """Return the settings of both sides."""
        return {
            "groups": self.groups,
            "group_size": 8,
            "minibatches": self.minibatches,
            "adam_beta2": 0.95,
            "adam_eps": self.adam_eps,
            "eps_low": 0.2,
            "eps_high": 0.28,
        }


SHORT = Task(name="short", weights=(0.0, 0.0, 1.0), max_new_tokens=64, warm_up_steps=400)
LONG_TAIL = Task(
    name="long_tail",
    weights=tuple(0.7**d for d in range(12)),
    max_new_tokens=192,
    warm_up_steps=700,
    own_steps=4,
)
CHAT = Task(
    name="chat",
    max_new_tokens=16,
    own_steps=2,
    groups=8,
    minibatches=1,
    adam_eps=1e-8,
    rates=dict.fromkeys(("areal_lite", "trl"), (1e-5, 2e-5)),
    rate_steps=8,
    thresholds=(0.5, 0.7),
    micro_batches=(16, 64),
)
TASKS = {task.name: task for task in (SHORT, LONG_TAIL, CHAT)}
"""short: three digits, answers of 43 to 45 tokens. long_tail: 1 to 12 digits, 15 to 171 tokens.

chat: SmolLM2-135M-Instruct and the sums of examples/chat_model, prompts of 45 tokens."""


def warm_model(task: Task, work: Path, seed: int) -> Path:
    """Return the model that training starts from. Make it if needed.

    A chat model is the folder that CHAT_MODEL names, or <work>/model.
    """
    if task.chat:
        model = Path(os.environ.get("CHAT_MODEL", work / "model")).absolute()
        if not model.exists():
            subprocess.run([sys.executable, EXAMPLE / "get_model.py", model], check=True)
        return model
    settings = f"max_digits={task.max_digits} trainer.steps={task.warm_up_steps} {WARM_UP}"
    return warm_up(work, seed, MODEL, settings.split())


def write_prompts(task: Task, folder: Path, seed: int) -> tuple[Path, Path]:
    """Write the prompts to train on and those held out as JSONL, and return both files."""
    if task.chat:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, EXAMPLE / "make_data.py"], cwd=folder, check=True)
        return folder / "data" / "train.jsonl", folder / "data" / "test.jsonl"
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
