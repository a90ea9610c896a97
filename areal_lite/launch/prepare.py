"""`areal-lite prepare`: the run directory of a training run whose roles are started one by one, in containers or on several machines.

    python -m areal_lite.launch.server_pool RUN_DIR FIRST COUNT      servers FIRST, FIRST + 1, …, on the GPUs that the command sees
    python -m areal_lite.controller.service RUN_DIR           one
    torchrun … -m areal_lite.trainer.loop RUN_DIR             trainer ranks
    python -m areal_lite.launch.prepare end RUN_DIR           when the trainer has ended: summary and report

The three may be started in any order and find each other in the run directory, which all of them must see. With `server.host=node`, the default
of this command, servers and controller listen at their machine's own address, and answer those who have the keys that are in that directory.
To start them again, `python -m areal_lite.launch.prepare begin RUN_DIR` or `areal-lite prepare … resume=auto` first: the run then goes on.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from areal_lite.config import TrainConfig, load_config, save_config
from areal_lite.run_dir.metrics import forget_after
from areal_lite.run_dir.paths import CONFIG_FILE, LOGS_DIR
from areal_lite.run_dir.resume import remove_stale_files, start_version

COMPLETE = 10  # exit status of `begin`: there is nothing left to do


def run(config: TrainConfig) -> int:
    """Write the run directory and print where it is."""
    run_dir = write(config)
    print(run_dir)
    return begin(run_dir)


def write(config: TrainConfig) -> Path:
    """config.yaml, of what concerns training alone, and a folder for logs. Returns the run directory, absolute."""
    run_dir = Path(config.run_dir).resolve()
    (run_dir / LOGS_DIR).mkdir(parents=True, exist_ok=True)
    save_config(
        TrainConfig(**{field.name: getattr(config, field.name) for field in fields(TrainConfig)}),
        run_dir,
    )
    return run_dir


def begin(run_dir: Path) -> int:
    """Before the roles start, also again: nothing is left of an earlier start, or of steps that it lost. Returns 0 or COMPLETE."""
    version = start_version(run_dir)
    if version >= load_config(run_dir).trainer.steps:
        print(f"the run is complete: it has a checkpoint of step {version}", file=sys.stderr)
        return COMPLETE
    remove_stale_files(run_dir)
    forget_after(run_dir, version)
    return 0


def end(run_dir: Path) -> int:
    """Write summary.json and report.png."""
    from areal_lite.launch.local import finish  # draws: slow to import

    finish(load_config(run_dir), run_dir, (run_dir / CONFIG_FILE).stat().st_mtime)
    return 0


if __name__ == "__main__":
    sys.exit({"begin": begin, "end": end}[sys.argv[1]](Path(sys.argv[2])))
