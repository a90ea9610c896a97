"""`areal-lite train` on one machine: the supervisor. It starts servers, controller and trainer ranks, watches them, and ends them all.

Everything starts at once: the controller waits for servers to be announced, the trainer for its first batch. If any role fails the run ends,
with the end of that role's log, but for a server, which is started again; however the run ends, no process is left.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console

from areal_lite.config import TrainConfig, save_config
from areal_lite.launch.debug import rollout_only, train_only
from areal_lite.launch.placement import place
from areal_lite.launch.roles import RoleFailed, Roles
from areal_lite.launch.server_pool import ServerPool, train_pool
from areal_lite.report.figure import summary_table, write_report
from areal_lite.report.progress import FollowedProgress
from areal_lite.report.summary import build_summary
from areal_lite.run_dir.metrics import forget_after, read_metrics
from areal_lite.run_dir.resume import (
    STOPPED,
    forget_start,
    sole_run,
    start_version,
    stop_requested,
    withdraw_stop,
)
from areal_lite.system.files import write_json
from areal_lite.system.gpus import resolve_device, visible_gpus


def run(config: TrainConfig) -> int:
    """Train, then write summary.json and report.png and show the summary; its path is the last line. Returns the exit status: 75 when the
    run was asked to stop (areal_lite/run_dir/resume.py) before its last step. Raises ValueError when it is going on already."""
    run_dir = Path(config.run_dir)
    with sole_run(run_dir):
        return _run(config, run_dir)


def _run(config: TrainConfig, run_dir: Path) -> int:
    started = time.time()
    print(f"run directory: {run_dir}", file=sys.stderr)
    if (version := start_version(run_dir)) >= config.trainer.steps:
        print(
            f"the run is complete: it has a checkpoint of step {version}, and trainer.steps={config.trainer.steps}",
            file=sys.stderr,
        )
        withdraw_stop(run_dir)
        if not (run_dir / "summary.json").exists():
            finish(config, run_dir, started)
        print(run_dir / "summary.json")
        return 0
    try:
        train(config, run_dir)
    except (RuntimeError, TimeoutError, KeyboardInterrupt) as error:
        if not isinstance(error, KeyboardInterrupt):
            print(f"areal-lite: {error}", file=sys.stderr)
        if read_metrics(run_dir):
            finish(config, run_dir, started)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finish(config, run_dir, started)
    if stop_requested(run_dir):
        print(
            f"stopped after step {start_version(run_dir)} as requested: resume=auto goes on from there",
            file=sys.stderr,
        )
    print(run_dir / "summary.json")
    return STOPPED if stop_requested(run_dir) else 0


def train(config: TrainConfig, run_dir: Path) -> None:
    """All roles, from start to end. Raises RoleFailed."""
    forget_start(run_dir)
    gpus = visible_gpus() if resolve_device(config.server.device) == "cuda" else []
    placement = place(gpus, config.trainer, config.server, config.sync.transport)
    if config.debug != "off":
        return {"rollout_only": rollout_only, "train_only": train_only}[config.debug](
            config, run_dir, placement
        )
    save_config(config, run_dir)
    if version := start_version(run_dir):
        print(f"the run goes on from step {version}", file=sys.stderr)
    forget_after(run_dir, version)
    with (
        train_pool(config, run_dir, dict(enumerate(placement.servers))) as pool,
        Roles(run_dir) as roles,
    ):
        controller = roles.start(
            "controller", [sys.executable, "-m", "areal_lite.controller.service", str(run_dir)]
        )
        ranks = roles.start_ranks(
            "trainer", "areal_lite.trainer.loop", run_dir, config.trainer, placement.trainer
        )
        pool.wait_ready(roles.check)
        progress = FollowedProgress(run_dir, "metrics", config.trainer.steps, "step", step_fields)
        roles.wait(
            [*ranks, controller],
            watch=lambda: (progress.show(), check_servers(pool, run_dir, config.trainer.steps)),
        )
        progress.close()


def check_servers(pool: ServerPool, run_dir: Path, steps: int) -> None:
    """Raise RoleFailed when no server is left, but not after the last of `steps`: the trainer then still saves what was learned, and the
    controller gives up what needs servers."""
    try:
        pool.check()
    except RoleFailed:
        if len(read_metrics(run_dir)) < steps:
            raise


def step_fields(step: dict) -> dict:
    """What the progress line says of a training step."""
    return {
        "reward": step["reward_mean"],
        "staleness": step["staleness_mean"],
        "tok_per_s": step["tokens"] / step["time_s"],
        "pause": f"{1000 * step['pause_s']:.0f} ms",
    }


def finish(config: TrainConfig, run_dir: Path, started: float) -> None:
    """Count up what happened, draw it, show it."""
    summary = build_summary(run_dir, config, started, time.time())
    summary["report"] = str(write_report(run_dir))
    write_json(run_dir / "summary.json", summary)
    console = Console(stderr=True)
    console.print(summary_table(summary))
    console.print(
        f"run directory: {run_dir}\nreport: {summary['report']}", highlight=False, soft_wrap=True
    )
