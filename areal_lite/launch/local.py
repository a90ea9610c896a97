"""`areal-lite train` on one machine: the supervisor of a run.

It starts servers, controller and trainer ranks at once (on a shared GPU the server first), watches
them, and ends them all. The controller waits for servers to be announced, the trainer for its first
batch. What fails or hangs is started again a limited number of times (server_pool.py, restarts.py).
However the run ends, no process is left.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from areal_lite.config import TrainConfig, reference_folders, save_config
from areal_lite.data.model_folder import check_model_folder
from areal_lite.extensions import DEBUG_MODES, OBSERVERS, load
from areal_lite.launch.restarts import Restarts, Watchdog
from areal_lite.launch.roles import Placement, ProcessFailed, Role, RoleFailed, Roles, place_run
from areal_lite.launch.server_pool import ServerPool, train_pool
from areal_lite.run_dir.metrics import EventFollower, forget_after, read_metrics
from areal_lite.run_dir.paths import SUMMARY_FILE
from areal_lite.run_dir.resume import (
    STOPPED,
    TRAINER_RUNS,
    clear_stop_request,
    lock_run_dir,
    remove_files,
    set_aside_damaged,
    start_version,
    stop_requested,
)
from areal_lite.system.files import write_json

CONTROLLER = "areal_lite.controller.service"
OnStep = Callable[[dict[str, Any]], object]
"""Called with each line of metrics.jsonl, soon after its training step."""


class Observer:
    """What a person sees of a run. This one prints a line for each step and writes no report.

    The entry `console` of `areal_lite.observers` is a better one, with these methods.
    """

    @contextmanager
    def watch(self, config: TrainConfig, run_dir: Path) -> Iterator[Callable[[], None]]:
        """Show training until the context ends. What it yields is called several times a second."""
        steps = EventFollower(run_dir, "metrics")
        steps.read()  # those of an earlier start

        def poll() -> None:
            for step in steps.read():
                reward = step["reward_mean"]
                text = "" if reward is None else f" · reward {reward:.3g}"
                print(f"step {step['step']}/{config.trainer.steps}{text}", file=sys.stderr)

        yield poll
        poll()

    def summarize(
        self, config: TrainConfig, run_dir: Path, started_at: float, finished_at: float
    ) -> dict[str, Any]:
        """Return the content of summary.json. Times are wall-clock seconds."""
        metrics = read_metrics(run_dir)
        return {
            "run_dir": str(run_dir),
            "steps": len(metrics),
            "steps_planned": config.trainer.steps,
            "wall_s": finished_at - started_at,
            "reward_first": metrics[0]["reward_mean"] if metrics else None,
            "reward_last": metrics[-1]["reward_mean"] if metrics else None,
        }

    def report(self, run_dir: Path, summary: dict[str, Any]) -> None:
        """Write the report of a run, and print its summary to stderr."""
        print(f"run directory: {run_dir}", file=sys.stderr)


def observer() -> Observer:
    """Return the observer of this machine."""
    return load(OBSERVERS, "console") or Observer()


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
    try:
        stopped = train_and_report(config)
    except (RuntimeError, TimeoutError) as error:
        print(f"areal-lite: {error}", file=sys.stderr)
        return 1
    print(Path(config.run_dir) / SUMMARY_FILE)
    return STOPPED if stopped else 0


def train_and_report(config: TrainConfig, on_step: OnStep | None = None) -> bool:
    """Train the steps that are left, write summary.json and report.png, and print the summary.

    Returns whether the run was asked to stop before its last step. The caller holds the lock of the
    run directory. Raises RuntimeError or TimeoutError when a role fails. A run that fails or is
    interrupted leaves a summary of its steps, too.
    """
    run_dir = Path(config.run_dir)
    print(f"run directory: {run_dir}", file=sys.stderr)
    set_aside_damaged(run_dir)
    if (step := start_version(run_dir)) >= config.trainer.steps:
        complete = f"the run is complete: it has a checkpoint of step {step}"
        print(f"{complete}, and trainer.steps={config.trainer.steps}", file=sys.stderr)
        clear_stop_request(run_dir)
        if not (run_dir / SUMMARY_FILE).exists():
            finish(config, run_dir, time.time())
        return False
    for model in filter(None, {config.model, *reference_folders(config).values()}):
        check_model_folder(Path(model))
    started_at = time.time()
    try:
        train(config, run_dir, on_step)
    except (RuntimeError, TimeoutError, KeyboardInterrupt):
        with suppress(OSError):  # a full disk must not hide why the run ended
            if read_metrics(run_dir):
                finish(config, run_dir, started_at)
        print(how_to_continue(config), file=sys.stderr)
        raise
    finish(config, run_dir, started_at)
    if stopped := stop_requested(run_dir):
        text = f"stopped as requested after step {start_version(run_dir)}: resume=auto continues"
        print(text, file=sys.stderr)
    return stopped


def how_to_continue(config: TrainConfig) -> str:
    """Say from which step a run that ended early can continue, and how."""
    if step := start_version(Path(config.run_dir)):
        return (
            f"the run ended early: the same command with run_dir={config.run_dir} resume=auto "
            f"continues from step {step}"
        )
    return (
        "the run ended early, without a checkpoint to continue from: trainer.save_every=N writes "
        f"one every N steps (it is {config.trainer.save_every}; 0 is one every half hour)"
    )


def train(config: TrainConfig, run_dir: Path, on_step: OnStep | None = None) -> None:
    """Run all roles until trainer and controller have ended. Raises RoleFailed when one fails."""
    remove_files(run_dir)
    placement = place_run(config)
    if config.debug == "off":
        _train_with_restarts(config, run_dir, placement, on_step)
    else:
        half = load(DEBUG_MODES, config.debug_mode)
        half.run(config, run_dir, placement, _step_reporter(run_dir, on_step))


def _train_with_restarts(
    config: TrainConfig, run_dir: Path, placement: Placement, on_step: OnStep | None
) -> None:
    save_config(config, run_dir)
    restarts = Restarts(config, run_dir)
    if restarts.start:
        print(f"the run resumes from step {restarts.start}", file=sys.stderr)
    with train_pool(config, run_dir, dict(enumerate(placement.servers))) as pool:
        while True:
            forget_after(run_dir, restarts.start)
            try:
                return _run_roles(config, run_dir, placement, pool, restarts, on_step)
            except ProcessFailed as failed:
                restarts.prepare(failed)


def _run_roles(
    config: TrainConfig,
    run_dir: Path,
    placement: Placement,
    pool: ServerPool,
    restarts: Restarts,
    on_step: OnStep | None,
) -> None:
    """Run controller and trainer ranks until they end. Raises ProcessFailed or RoleFailed."""
    steps = config.trainer.steps
    report_steps = _step_reporter(run_dir, on_step)
    with Roles(run_dir) as roles, observer().watch(config, run_dir) as show:
        controller = roles.start_module("controller", CONTROLLER)
        watchdog = Watchdog(roles, config.restart.hang_timeout_s)

        def watch_start() -> None:
            show()
            roles.check()
            watchdog.check()

        if placement.shared:  # SGLang sizes its KV cache by the memory that it finds free
            pool.wait_ready(watch_start)
        ranks = roles.start_ranks(
            "trainer", "areal_lite.trainer.loop", config.trainer, placement.trainer
        )

        def watch() -> None:
            show()
            report_steps()
            check_servers(pool, run_dir, steps)
            watchdog.check()

        pool.wait_ready(watch_start)
        while True:
            try:
                return roles.wait([*ranks, controller], watch=watch)
            except ProcessFailed as failed:
                controller = _replace_controller(failed, roles, restarts)
                watchdog.forget(controller)


def _replace_controller(failed: ProcessFailed, roles: Roles, restarts: Restarts) -> Role:
    """Start another controller under the running trainer. Raises `failed` if that cannot help."""
    if not restarts.alone(failed):
        raise failed
    roles.forget(failed.role)
    restarts.prepare_controller(failed)
    return roles.start_module("controller", CONTROLLER, TRAINER_RUNS)


def _step_reporter(run_dir: Path, on_step: OnStep | None) -> Callable[[], None]:
    """Return a function that passes the training steps since its last call to `on_step`."""
    steps = EventFollower(run_dir, "metrics")
    steps.read()  # those of an earlier start

    def report() -> None:
        if on_step:
            for step in steps.read():
                on_step(step)

    return report


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


def finish(config: TrainConfig, run_dir: Path, started_at: float) -> None:
    """Write summary.json and the report, and print it. `started_at` is in wall-clock seconds."""
    summary = observer().summarize(config, run_dir, started_at, time.time())
    write_json(run_dir / SUMMARY_FILE, summary)
    observer().report(run_dir, summary)
