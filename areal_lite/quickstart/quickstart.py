"""`areal-lite quickstart`: make a model, warm it up and train it, in one run directory."""

import sys
from dataclasses import fields
from pathlib import Path

from areal_lite.config import QuickstartConfig, TrainConfig
from areal_lite.launch import local
from areal_lite.quickstart import launch_sft, make_model
from areal_lite.run_dir.resume import lock_run_dir


def run(config: QuickstartConfig) -> int:
    """Run the three commands in turn, until one fails; return its exit status."""
    train = TrainConfig(
        **{field.name: getattr(config, field.name) for field in fields(TrainConfig)}
    )
    steps = (
        ("make a small model", lambda: make_model.run(config.make_model)),
        (
            "warm it up on demonstrations of a teacher who forgets carries",
            lambda: launch_sft.run(config.sft),
        ),
        (
            "reinforcement learning: a real SGLang server, a real Megatron trainer",
            lambda: local.run_locked(train),
        ),
    )
    with lock_run_dir(Path(config.run_dir)):
        for number, (title, command) in enumerate(steps, start=1):
            print(f"{number}/{len(steps)} {title}", file=sys.stderr)
            if status := command():
                return status
    return 0
