"""A run that this process plays by itself, with its progress: `replayed_run.py RUN_DIR STEPS`.

It writes what controller and trainer would, and messages like those of the supervisor. After
each step it writes a window title: then the screen is complete.
"""

import itertools
import os
import sys
import time
from pathlib import Path

import msgspec

from areal_lite.config import TrainConfig, save_config
from areal_lite.launch.roles import interruptible
from areal_lite.run_dir.controller_status import TrainerPhase, write_status
from areal_lite.run_dir.metrics import STEP_KEYS, append_event
from areal_lite.tools.report import panel as progress_module
from areal_lite.tools.report import run_watch
from areal_lite.tools.report.panel import Progress
from areal_lite.tools.report.run_watch import RunWatch
from tests.unit.run_dir.sample_status import STATUS

PHASES = (TrainerPhase.WAITING, TrainerPhase.TRAINING, TrainerPhase.PUSHING)


def play(run_dir: Path, steps: int) -> None:
    """Play a run of `steps` steps, with a view after each."""
    config = TrainConfig(model="model", run_dir=str(run_dir))
    config.trainer.steps = steps
    (run_dir / "logs").mkdir(parents=True)
    save_config(config, run_dir)
    scores = {"greedy": 0.25, "sampled": 0.125, "problems": 64}
    append_event(run_dir, "evals", {"name": "", "version": 0, "versions": [0], **scores})
    with interruptible(), Progress(RunWatch(config, run_dir).view) as progress:
        print("server-0 is ready 1 s after start", file=sys.stderr)
        for step, phase in zip(range(1, steps + 1), itertools.cycle(PHASES)):
            record = {**dict.fromkeys(STEP_KEYS, 1), "step": step, "pause_s": 0.032}
            append_event(run_dir, "metrics", record)
            status = msgspec.structs.replace(STATUS, version=step, step=step, trainer=phase)
            write_status(run_dir, status)
            if step % 4 == 0:
                now = time.strftime("%F %T")
                text = f"{now},678 WARNING areal_lite.controller: group {step} failed"
                with open(run_dir / "logs" / "controller.log", "a") as log:
                    print(text, file=log)
                print(f"message {step} {'of many words ' * 4}", file=sys.stderr)
                print(f"result {step}")
            progress.poll()
            if sys.stderr.isatty():
                os.write(2, f"\x1b]2;{step}\x07".encode())
            time.sleep(0.05)


if __name__ == "__main__":
    progress_module._POLL_INTERVAL_S = run_watch._LOOK_INTERVAL_S = 0.0
    try:
        play(Path(sys.argv[1]), int(sys.argv[2]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        os._exit(130)
    print("summary.json")
