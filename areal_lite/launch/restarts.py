"""The restarts of controller and trainer during a run on one machine.

Both start again together, from the newest checkpoint, as `resume=auto` starts them. The servers
keep running. The new controller ends their requests, and the new trainer pushes its weights to them
before they get another one (Fleet.take_over).
"""

import sys
import time
from pathlib import Path

from areal_lite.config import TrainConfig
from areal_lite.launch.restart_policy import Failure, GiveUp, decide, error_identity
from areal_lite.launch.roles import ProcessFailed, RoleFailed
from areal_lite.run_dir.metrics import newest_event
from areal_lite.run_dir.paths import LOGS_DIR
from areal_lite.run_dir.resume import (
    remove_role_files,
    set_aside_damaged,
    start_version,
    stop_requested,
)

LOG = "restarts.log"


class Restarts:
    """Decides after each failure of controller or trainer, and prepares the next start.

    `start` is the step from which the present start continues.
    """

    def __init__(self, config: TrainConfig, run_dir: Path):
        self._config = config
        self._run_dir = run_dir
        self._failures: list[Failure] = []
        # The failure to show first if the run ends: the first one of those without progress.
        self._cause: ProcessFailed | None = None
        self.start = start_version(run_dir)

    def prepare(self, failed: ProcessFailed) -> None:
        """Log the failure, wait, and prepare the run directory for the next start.

        No process of controller and trainer may be left. Raises RoleFailed when the run must end.
        """
        failure = self._record(failed)
        if self._cause is None or failure.progressed:
            self._cause = failed
        decision = decide(self._failures, self._config.restart)
        if stop_requested(self._run_dir):
            decision = GiveUp("the run was asked to stop")
        if isinstance(decision, GiveUp):
            raise self._end(failed, decision)
        try:
            set_aside_damaged(self._run_dir)
        except ValueError as error:
            raise self._end(failed, GiveUp(str(error))) from error
        remove_role_files(self._run_dir)
        self.start = start_version(self._run_dir)
        self._log(
            f"{failed}\ncontroller and trainer start again from step {self.start} in "
            f"{decision.delay_s:g} s (restart {decision.number} of {self._config.restart.max} "
            f"within {self._config.restart.window_s:g} s): {failed.what}"
        )
        time.sleep(decision.delay_s)

    def _record(self, failed: ProcessFailed) -> Failure:
        newest = newest_event(self._run_dir, "metrics")
        steps = newest["step"] if newest else 0
        is_left = start_version(self._run_dir) < self._config.trainer.steps
        reported = (failed.role.process.poll() or 0) > 0
        failure = Failure(
            at_s=time.monotonic(),
            error=error_identity(failed.role.output()) if reported else None,
            progressed=steps > self.start and is_left,
        )
        self._failures.append(failure)
        return failure

    def _end(self, failed: ProcessFailed, decision: GiveUp) -> RoleFailed:
        """Return the error that ends the run. It begins with the cause."""
        later = "" if failed is self._cause else f"\nThe last failure after it: {failed.what}"
        error = RoleFailed(f"{self._cause}{later}\nThe run ends: {decision.reason}")
        self._log(str(error), on_terminal=False)
        return error

    def _log(self, text: str, on_terminal: bool = True) -> None:
        if on_terminal:
            print(text, file=sys.stderr, flush=True)
        with open(self._run_dir / LOGS_DIR / LOG, "a") as log:
            log.write(f"{time.strftime('%F %T')} {text}\n")
