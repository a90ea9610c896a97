"""Warm a model up: start the ranks and show their progress.

python -m areal_lite.quickstart.sft model=FOLDER out=FOLDER max_digits=3 …
"""

import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_lite.cli import run_command
from areal_lite.config import save_config
from areal_lite.data.model_folder import check_model_folder
from areal_lite.launch.roles import RoleFailed, Roles
from areal_lite.quickstart.command import SftConfig
from areal_lite.run_dir.metrics import EventFollower
from areal_lite.run_dir.resume import (
    STOPPED,
    clear_stop_request,
    lock_run_dir,
    stop_requested,
)
from areal_lite.tools.formatting import short
from areal_lite.tools.report.panel import Progress, View, eta, sparkline

_RANK = "areal_lite.quickstart.sft_rank"
# The steps whose mean pace is shown.
_RECENT_STEPS = 50


class _StopRequested(Exception):
    """Somebody asked the warm-up to stop."""


def run(config: SftConfig) -> int:
    """Warm up and export to `config.out`; return the exit status.

    It is STOPPED if a stop was requested: a warm-up has no checkpoint, and begins again. Raises
    ValueError if `config.out` exists.
    """
    if Path(config.out).exists():
        raise ValueError(f"out={config.out} exists already: remove it or choose another folder")
    with lock_run_dir(Path(config.run_dir)):
        return _warm_up(config, Path(config.run_dir))


def _warm_up(config: SftConfig, run_dir: Path) -> int:
    check_model_folder(Path(config.model))
    save_config(config, run_dir)
    clear_stop_request(run_dir)
    (run_dir / "sft.jsonl").unlink(missing_ok=True)  # a warm-up always starts from the beginning
    try:
        with Roles(run_dir) as roles, Progress(WarmUpWatch(config, run_dir).view) as progress:
            ranks = roles.start_ranks(
                "trainer", "areal_lite.quickstart.sft_rank", config.trainer, []
            )

            def watch() -> None:
                progress.poll()
                if stop_requested(run_dir):
                    raise _StopRequested

            roles.wait(ranks, watch=watch)
    except _StopRequested:
        print("stopped as requested: the warm-up begins again", file=sys.stderr)
        return STOPPED
    except RoleFailed as error:
        print(f"areal-lite: {error}", file=sys.stderr)
        return 1
    print(config.out)
    return 0


class WarmUpWatch:
    """Follows the file of a warm-up."""

    def __init__(self, config: SftConfig, run_dir: Path):
        self._config = config
        self._run_dir = run_dir
        self._file = EventFollower(run_dir, "sft")
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT_STEPS)
        self._losses: list[float] = []

    def view(self) -> View:
        """Return the present content of the panel."""
        new = self._file.read()
        self._recent.extend(new)
        self._losses += [step["loss"] for step in new]
        total = self._config.trainer.steps
        view = View(title=f"warm-up · {self._run_dir}", unit="warm-up step", done=0, total=total)
        if not self._recent:
            return replace(view, waits={"trainer": "loads the model"})
        step = self._recent[-1]
        times_s = [step["time_s"] for step in self._recent]
        rate = self._config.batch_size * len(times_s) / sum(times_s)
        loss = f"{short(step['loss'])} {sparkline(self._losses, 10)}"
        return replace(
            view,
            done=step["step"],
            eta_s=eta(times_s, total - step["step"], 0.0),
            line={"loss": step["loss"]},
            sections={
                "learning": {"loss": loss},
                "speed": {"demonstrations": f"{short(rate)}/s"},
            },
        )


if __name__ == "__main__":
    sys.exit(run_command("sft", sys.argv[1:]))
