"""Warm a model up: start the ranks and show their progress.

python -m areal_lite_quickstart.sft model=FOLDER out=FOLDER max_digits=3 …
"""

import sys
from dataclasses import replace
from pathlib import Path

from areal_lite.cli import run_command
from areal_lite.config import save_config
from areal_lite.data.model_folder import check_model_folder
from areal_lite.launch.roles import Roles
from areal_lite.run_dir.metrics import read_events
from areal_lite.run_dir.resume import STOPPED, clear_stop_request, lock_run_dir, stop_requested
from areal_lite.tools.formatting import short
from areal_lite.tools.report.panel import Progress, View, eta, sparkline
from areal_lite.tools.report.summary import known_values
from areal_lite_quickstart.command import SftConfig

_RANK = "areal_lite_quickstart.sft_rank"
# The steps whose mean pace is shown.
_RECENT_STEPS = 50


class _StopRequested(Exception):
    """Somebody asked the warm-up to stop."""


def run(config: SftConfig) -> int:
    """Warm up and export to `config.out`; return the exit status.

    It is STOPPED if a stop was requested: a warm-up has no checkpoint, and begins again. Raises
    ValueError if `config.out` exists, and RoleFailed when a rank fails.
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
        with Roles(run_dir) as roles, Progress(lambda: warm_up_view(config, run_dir)) as progress:
            ranks = roles.start_ranks(_RANK, config.trainer, [])

            def watch() -> None:
                progress.poll()
                if stop_requested(run_dir):
                    raise _StopRequested

            roles.wait(ranks, watch=watch)
    except _StopRequested:
        print("stopped as requested: the warm-up begins again", file=sys.stderr)
        return STOPPED
    print(config.out)
    return 0


def warm_up_view(config: SftConfig, run_dir: Path) -> View:
    """Return the present content of the panel, from what the ranks have logged."""
    steps = read_events(run_dir, "sft")
    done, total = len(steps), config.trainer.steps
    view = View(title=f"warm-up · {run_dir}", unit="warm-up step", done=done, total=total)
    if not steps:
        return replace(view, waits={"trainer": "loads the model"})
    times_s = [step["time_s"] for step in steps[-_RECENT_STEPS:]]
    rate = config.batch_size * len(times_s) / sum(times_s)
    losses = known_values(steps, "loss")
    loss = "not finite" if steps[-1]["loss"] is None else short(losses[-1])
    return replace(
        view,
        eta_s=eta(times_s, total - done, 0.0),
        line=[f"loss {loss}"],
        sections={
            "learning": {"loss": f"{loss} {sparkline(losses, 10)}"},
            "speed": {"demonstrations": f"{short(rate)}/s"},
        },
    )


if __name__ == "__main__":
    sys.exit(run_command("sft", sys.argv[1:]))
