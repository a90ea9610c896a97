"""`areal-lite sft`: start the ranks of a supervised warm-up and show their progress."""

import sys
from pathlib import Path

from areal_lite.config import SftConfig, save_config
from areal_lite.data.model_folder import check_model_folder
from areal_lite.launch.roles import RoleFailed, Roles
from areal_lite.report.progress import FollowedProgress
from areal_lite.run_dir.resume import lock_run_dir


def run(config: SftConfig) -> int:
    """Warm up and export to `config.out`; return the exit status.

    Raises ValueError if `config.out` exists.
    """
    if Path(config.out).exists():
        raise ValueError(f"out={config.out} exists already: remove it or choose another folder")
    with lock_run_dir(Path(config.run_dir)):
        return _warm_up(config, Path(config.run_dir))


def _warm_up(config: SftConfig, run_dir: Path) -> int:
    check_model_folder(Path(config.model))
    save_config(config, run_dir)
    progress = FollowedProgress(
        run_dir,
        "sft",
        config.trainer.steps,
        "warm-up step",
        lambda step: {"loss": step["loss"]},
    )
    try:
        with Roles(run_dir) as roles, progress:
            ranks = roles.start_ranks("trainer", "areal_lite.quickstart.sft", config.trainer, [])
            roles.wait(ranks, watch=progress.poll)
    except RoleFailed as error:
        print(f"areal-lite: {error}", file=sys.stderr)
        return 1
    print(config.out)
    return 0
