"""Make a model, warm it up and train it, in one run directory (`areal-lite quickstart`).

`resume=auto` leaves out the stages whose model exists: a model that exists is complete.
"""

import sys
from pathlib import Path

from areal_lite.launch import local
from areal_lite.launch.prepare import train_settings
from areal_lite.run_dir.resume import STOPPED, clear_stop_request, lock_run_dir, stop_requested
from areal_lite_quickstart import make_model, sft
from areal_lite_quickstart.command import QuickstartConfig


def run(config: QuickstartConfig) -> int:
    """Run the three commands in turn, until one fails; return its exit status.

    A stop that is requested before the training ends it with STOPPED, too.
    """
    stages = (
        ("make a small model", config.make_model.out, lambda: make_model.run(config.make_model)),
        (
            "warm it up on demonstrations of a teacher that forgets carries",
            config.sft.out,
            lambda: sft.run(config.sft),
        ),
        (
            "reinforcement learning: a real SGLang server, a real Megatron trainer",
            None,
            lambda: local.run_locked(train_settings(config)),
        ),
    )
    run_dir = Path(config.run_dir)
    with lock_run_dir(run_dir):
        clear_stop_request(run_dir)
        for number, (title, model, command) in enumerate(stages, start=1):
            done = config.resume == "auto" and model is not None and Path(model).exists()
            before = f": done before, {model}" if done else ""
            print(f"{number}/{len(stages)} {title}{before}", file=sys.stderr)
            if not done and (status := command()):
                return status
            if model is not None and stop_requested(run_dir):
                return STOPPED
    return 0
