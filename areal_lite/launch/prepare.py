"""`areal-lite train --prepare`: write a run directory for roles that start one by one.

docs/running.md (By hand) has their commands. As a module it runs a step of such a run:

    python -m areal_lite.launch.prepare begin RUN_DIR              before its roles start again
    python -m areal_lite.launch.prepare end RUN_DIR                after the trainer: the report
    python -m areal_lite.launch.prepare health RUN_DIR             0 if all announced servers answer
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from areal_lite.config import TrainConfig, changed_settings, load_config, save_config
from areal_lite.run_dir import resume
from areal_lite.run_dir.metrics import forget_after
from areal_lite.run_dir.paths import CONFIG_FILE, LOGS_DIR, STOP_FILE, SUMMARY_FILE
from areal_lite.servers.blocking import start_reaching
from areal_lite.servers.registry import announced_servers

COMPLETE = 10  # the exit status of `begin` when the run has no steps left
_HEALTH_TIMEOUT_S = 10.0


def run(config: TrainConfig) -> int:
    """Write the run directory and print its path. Returns the exit status, as `begin` does.

    Raises ValueError while a run with other settings is going on there.
    """
    run_dir = Path(config.run_dir).resolve()
    if not resume.is_locked(run_dir):
        with resume.lock_run_dir(run_dir):
            print(write(config))
            return _begin(run_dir)
    if changed := changed_settings(train_settings(config), run_dir):
        raise ValueError(
            f"run_dir={run_dir}: a run is going on there with other settings of "
            f"{', '.join(changed)}: end it first (docker compose --profile gpu stop, or a file "
            f"{run_dir / STOP_FILE}), or choose another folder"
        )
    print(f"{run_dir}: the run is going on with these settings, and is left alone")
    return 0


def train_settings(config: TrainConfig) -> TrainConfig:
    """Leave out the settings of commands other than `train`."""
    return TrainConfig(**{field.name: getattr(config, field.name) for field in fields(TrainConfig)})


def write(config: TrainConfig) -> Path:
    """Write config.yaml and make a folder for logs. Returns the absolute (locked) folder."""
    run_dir = Path(config.run_dir).resolve()
    (run_dir / LOGS_DIR).mkdir(parents=True, exist_ok=True)
    save_config(train_settings(config), run_dir)
    return run_dir


def begin(run_dir: Path) -> int:
    """Remove the remains of an earlier start: addresses of processes, the log of lost steps.

    Returns 0, or COMPLETE when no steps are left. Raises ValueError while the run is going on.
    """
    load_config(run_dir)  # raises where no run is: the lock would make its folder
    with resume.lock_run_dir(run_dir):
        return _begin(run_dir)


def _begin(run_dir: Path) -> int:
    resume.set_aside_damaged(run_dir)
    if (version := resume.start_version(run_dir)) >= load_config(run_dir).trainer.steps:
        print(f"the run is complete: it has a checkpoint of step {version}", file=sys.stderr)
        if not (run_dir / SUMMARY_FILE).exists():  # it was stopped before `end`
            end(run_dir)
        return COMPLETE
    resume.remove_files(run_dir)
    forget_after(run_dir, version)
    (run_dir / CONFIG_FILE).touch()  # its time is that of this start
    return 0


def end(run_dir: Path) -> int:
    """Write summary.json and report.png. Returns the exit status."""
    from areal_lite.launch.local import finish  # `begin` does not need its imports

    finish(load_config(run_dir), run_dir, (run_dir / CONFIG_FILE).stat().st_mtime)
    return 0


def health(run_dir: Path) -> int:
    """Return the exit status 0 if a server is announced and every announced one answers, else 1."""
    asked = [start_reaching(server, _HEALTH_TIMEOUT_S) for server in announced_servers(run_dir)]
    return not (asked and all(answers.result() for answers in asked))


def main() -> int:
    """Run a step of a run whose roles are started one by one. Returns the exit status."""
    steps = {"begin": begin, "end": end, "health": health}
    parser = argparse.ArgumentParser(description="Begin or end a run, or ask after its servers.")
    parser.add_argument("step", choices=steps)
    parser.add_argument("run_dir", type=Path)
    words = parser.parse_args()
    try:
        return steps[words.step](words.run_dir)
    except (ValueError, OSError) as error:
        print(f"areal-lite: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
