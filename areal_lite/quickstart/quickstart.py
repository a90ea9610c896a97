"""`areal-lite quickstart`: a model from nothing, its warm-up, and reinforcement learning beyond its teacher, in one run directory."""

from __future__ import annotations

import sys
from dataclasses import fields

from areal_lite.config import QuickstartConfig, TrainConfig
from areal_lite.launch import local
from areal_lite.quickstart import launch_sft, make_model


def run(config: QuickstartConfig) -> int:
    """The three commands in turn; the first that fails ends it. Returns its exit status."""
    print("1/3 a small model from nothing", file=sys.stderr)
    if status := make_model.run(config.make_model):
        return status
    print("2/3 warm-up on demonstrations of a teacher who forgets carries", file=sys.stderr)
    if status := launch_sft.run(config.sft):
        return status
    print(
        "3/3 reinforcement learning: a real SGLang server, a real Megatron trainer", file=sys.stderr
    )
    return local.run(
        TrainConfig(**{field.name: getattr(config, field.name) for field in fields(TrainConfig)})
    )
