"""Draw the panel of a recorded run as it was in the middle: python docs/figures/panel.py

It writes panel.svg beside this file. The numbers are those of the run. Its controller's status was
not kept: it is made from the metrics of the step.
"""

import io
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from areal_lite.config import load_config
from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase
from areal_lite.run_dir.metrics import forget_after, read_events, read_metrics
from areal_lite.run_dir.paths import SUMMARY_FILE
from areal_lite.run_dir.resume import lock_run_dir
from areal_lite.tools.diagnose.diagnosis import diagnose
from areal_lite.tools.diagnose.history import read_history
from areal_lite.tools.report.panel import RECENT_STEPS, RunState, View, ViewPanel, train_view
from areal_lite.tools.report.run_watch import finding_notices
from tests.unit.tools.report.recorded_run import unpack

STEP = 15
COLUMNS = 84
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def status(step: Mapping[str, Any], batch_groups: int) -> ControllerStatus:
    """Return the status of the controller just after `step`."""
    return ControllerStatus(
        version=step["version"],
        step=step["step"],
        trainer=TrainerPhase.TRAINING,
        batch_step=None,
        missing_groups=batch_groups,
        queued_groups=step["queue_depth"],
        running_groups=0,
        capacity=batch_groups,
        in_flight=step["in_flight"],
        concurrency_limit=step["concurrency_limit"],
        requests=step["in_flight"],
        servers_ready=2,
        servers_announced=2,
        evaluating=[],
    )


def view_of_run() -> tuple[View, float]:
    """Return the view of the run after STEP, and the seconds since its first step began."""
    run_dir = unpack("async", Path("runs"))
    (run_dir / SUMMARY_FILE).unlink()
    forget_after(run_dir, STEP)
    steps = read_metrics(run_dir)
    config = load_config(run_dir)
    with lock_run_dir(run_dir):  # as a run does that goes on
        findings = diagnose(read_history(run_dir, now=steps[-1]["logged_at"]))
    state = RunState(
        config=config,
        steps=steps[-RECENT_STEPS:],
        rewards=[step["reward_mean"] for step in steps],
        evaluation=read_events(run_dir, "evals")[-1],
        status=status(steps[-1], config.trainer.batch_groups),
        notices=finding_notices(findings, run_dir),
    )
    elapsed_s = steps[-1]["logged_at"] - steps[0]["logged_at"] + steps[0]["time_s"]
    return train_view(state), elapsed_s


def main() -> None:
    picture = Path(__file__).resolve().with_name("panel.svg")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        view, elapsed_s = view_of_run()
        os.chdir("/")
    console = Console(
        record=True, file=io.StringIO(), width=COLUMNS, height=40, force_terminal=True
    )
    console.print(ViewPanel(view, elapsed_s))
    # The fonts of the reader: the site needs no network.
    form = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code, monospace", FONTS)
    svg = console.export_svg(title="areal-lite train", code_format=form, unique_id="panel")
    picture.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


if __name__ == "__main__":
    main()
