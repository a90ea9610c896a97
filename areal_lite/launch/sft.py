"""`areal-lite sft`: start the ranks of a supervised warm-up and show their progress."""

from __future__ import annotations

import sys
from pathlib import Path

from areal_lite.config import SftConfig, save_config
from areal_lite.launch.roles import RoleFailed, Roles, interruptible
from areal_lite.observe.metrics import read_events
from areal_lite.observe.progress import Progress


def run(config: SftConfig) -> int:
    """Warm up and export to `config.out`. Returns the exit status."""
    try:
        with interruptible():
            warm_up(config)
    except RoleFailed as error:
        print(f"areal-lite: {error}", file=sys.stderr)
        return 1
    print(config.out)
    return 0


def warm_up(config: SftConfig) -> None:
    """Raises ValueError if `config.out` exists, RoleFailed if a rank fails."""
    if Path(config.out).exists():
        raise ValueError(f"out={config.out} exists already: remove it or choose another folder")
    run_dir = Path(config.run_dir)
    save_config(config, run_dir)
    progress = Progress(config.trainer.steps, "warm-up step")

    def show() -> None:
        steps = read_events(run_dir, "sft")
        if steps:
            progress.update(len(steps), loss=f"{steps[-1]['loss']:.3f}")

    with Roles(run_dir) as roles:
        roles.wait(roles.start_ranks("trainer", "areal_lite.trainer.sft", run_dir, config.trainer), poll_s=1.0, watch=show)
    progress.close()
