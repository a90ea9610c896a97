"""`areal-lite train` on one machine.

This process supervises the run: it starts servers, controller and trainer ranks, watches them, and
ends them all. Everything starts at once, but on a shared GPU the server comes before the trainer.
The controller waits for servers to be announced, the trainer for its first batch.

* A server that fails is started again (server_pool.py). If any other role fails, the run ends with
  the last lines of that role's log.
* However the run ends, no process is left.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_lite.config import TrainConfig, save_config
from areal_lite.data.model_folder import check_model_folder
from areal_lite.diagnose.diagnosis import alarm_line
from areal_lite.launch.debug import rollout_only, train_only
from areal_lite.launch.placement import Placement, place
from areal_lite.launch.roles import RoleFailed, Roles
from areal_lite.launch.server_pool import ServerPool, train_pool
from areal_lite.report.progress import FollowedProgress
from areal_lite.report.summary import build_summary
from areal_lite.report.summary_table import summary_table
from areal_lite.report.text import pause
from areal_lite.run_dir.metrics import forget_after, read_metrics
from areal_lite.run_dir.paths import SUMMARY_FILE
from areal_lite.run_dir.resume import (
    STOPPED,
    clear_stop_request,
    lock_run_dir,
    remove_stale_files,
    set_aside_damaged,
    start_version,
    stop_requested,
)
from areal_lite.system.files import write_json
from areal_lite.system.gpus import resolve_device, visible_gpus


def run(config: TrainConfig) -> int:
    """Train, write summary.json and report.png, and print the summary.

    The last line on stdout is the path of summary.json. Returns the exit status: STOPPED (75) when
    the run was asked to stop before its last step. Raises ValueError when another process runs in
    the same directory.
    """
    with lock_run_dir(Path(config.run_dir)):
        return run_locked(config)


def run_locked(config: TrainConfig) -> int:
    """Train as `run` does, while the caller holds the lock of the run directory."""
    run_dir = Path(config.run_dir)
    print(f"run directory: {run_dir}", file=sys.stderr)
    set_aside_damaged(run_dir)
    if start_version(run_dir) >= config.trainer.steps:
        return _already_complete(config, run_dir)
    for model in filter(None, (config.model, config.algo.reference)):
        check_model_folder(Path(model))
    return _train_and_report(config, run_dir)


def _already_complete(config: TrainConfig, run_dir: Path) -> int:
    """Report a run that has no steps left."""
    print(
        f"the run is complete: it has a checkpoint of step {start_version(run_dir)}, "
        f"and trainer.steps={config.trainer.steps}",
        file=sys.stderr,
    )
    clear_stop_request(run_dir)
    if not (run_dir / SUMMARY_FILE).exists():
        finish(config, run_dir, time.time())
    print(run_dir / SUMMARY_FILE)
    return 0


def _train_and_report(config: TrainConfig, run_dir: Path) -> int:
    started_at = time.time()
    try:
        train(config, run_dir)
    except (RuntimeError, TimeoutError, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:
            print(f"areal-lite: {error}", file=sys.stderr)
        if read_metrics(run_dir):
            finish(config, run_dir, started_at)
        return 130 if interrupted else 1
    finish(config, run_dir, started_at)
    stopped = stop_requested(run_dir)
    if stopped:
        print(
            f"stopped as requested after step {start_version(run_dir)}: resume=auto continues",
            file=sys.stderr,
        )
    print(run_dir / SUMMARY_FILE)
    return STOPPED if stopped else 0


def train(config: TrainConfig, run_dir: Path) -> None:
    """Run all roles until the trainer and the controller have ended.

    Raises RoleFailed when a role fails.
    """
    remove_stale_files(run_dir)
    gpus = visible_gpus() if resolve_device(config.server.device) == "cuda" else []
    placement = place(gpus, config.trainer, config.server, config.sync.transport)
    if config.debug == "rollout_only":
        rollout_only(config, run_dir, placement)
    elif config.debug == "train_only":
        train_only(config, run_dir, placement)
    else:
        _train(config, run_dir, placement)


def _train(config: TrainConfig, run_dir: Path, placement: Placement) -> None:
    steps = config.trainer.steps
    save_config(config, run_dir)
    if version := start_version(run_dir):
        print(f"the run resumes from step {version}", file=sys.stderr)
    forget_after(run_dir, version)
    servers = dict(enumerate(placement.servers))
    with train_pool(config, run_dir, servers) as pool, Roles(run_dir) as roles:
        controller = roles.start_module("controller", "areal_lite.controller.service")
        if placement.shared:  # SGLang sizes its KV cache by the memory that it finds free
            pool.wait_ready(roles.check)
        ranks = roles.start_ranks(
            "trainer", "areal_lite.trainer.loop", config.trainer, placement.trainer
        )
        pool.wait_ready(roles.check)
        with FollowedProgress(run_dir, "metrics", steps, "step", step_fields) as progress:

            def watch() -> None:
                progress.poll()
                check_servers(pool, run_dir, steps)

            roles.wait([*ranks, controller], watch=watch)


def check_servers(pool: ServerPool, run_dir: Path, steps: int) -> None:
    """Raise RoleFailed when no server is left, unless all `steps` are trained.

    After the last step the trainer must still save its weights, and the controller skips what
    needs servers.
    """
    try:
        pool.check()
    except RoleFailed:
        if len(read_metrics(run_dir)) < steps:
            raise


def step_fields(step: Mapping[str, Any]) -> dict[str, Any]:
    """Select the fields of the progress line from a line of metrics.jsonl."""
    return {
        "reward": step["reward_mean"],
        "staleness": step["staleness_mean"],
        "tok_per_s": step["tokens"] / step["time_s"],
        "pause": None if step["pause_s"] is None else pause(step["pause_s"]),
    }


def finish(config: TrainConfig, run_dir: Path, started_at: float) -> None:
    """Write summary.json, report.png and report.html, and print the summary.

    `started_at`: wall-clock seconds at which the run started.
    """
    from areal_lite.report.figure import write_report  # matplotlib is slow to import
    from areal_lite.report.page_build import write_page

    summary = build_summary(run_dir, config, started_at, time.time())
    summary["report"] = str(write_report(run_dir))
    write_json(run_dir / SUMMARY_FILE, summary)
    console = Console(stderr=True)
    console.print(summary_table(summary))
    paths = f"run directory: {run_dir}\nreport: {summary['report']}, {write_page(run_dir)}"
    console.print(paths, highlight=False, soft_wrap=True)
    if line := alarm_line(run_dir):
        console.print(line, highlight=False, soft_wrap=True)
