"""The restarts of controller and trainer during a run on one machine.

* A controller that is killed or hangs starts again alone. The trainer keeps its step and its batch,
  and asks the new controller what the old one did not answer (controller/batches.py).
* After any other failure both start again, from the newest checkpoint, as `resume=auto` starts
  them. The new trainer pushes its weights to the servers before they get another request
  (Fleet.take_over).

The servers keep running. The new controller ends their requests.
"""

import sys
import time
from pathlib import Path

from areal_lite.config import TrainConfig
from areal_lite.launch.restart_policy import Failure, GiveUp, Restart, decide, error_identity
from areal_lite.launch.roles import ProcessFailed, RoleFailed
from areal_lite.run_dir.metrics import newest_event
from areal_lite.run_dir.paths import LOGS_DIR
from areal_lite.run_dir.resume import (
    remove_controller_files,
    remove_role_files,
    set_aside_damaged,
    start_version,
    stop_requested,
)
from areal_lite.system.files import append_log

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
        if stop_requested(self._run_dir):
            self._record(failed)
            raise self._end(failed, GiveUp("the run was asked to stop"))
        restart = self._decide(failed)
        try:
            set_aside_damaged(self._run_dir)
        except ValueError as error:
            raise self._end(failed, GiveUp(str(error))) from error
        remove_role_files(self._run_dir)
        self.start = start_version(self._run_dir)
        self._wait(failed, restart, f"controller and trainer start again from step {self.start}")

    def alone(self, failed: ProcessFailed) -> bool:
        """Return whether what failed is a controller that can start again under the trainer.

        One that reports an error has told the ranks, which end, too. The batches of a replay buffer
        are not recorded before the end of their step.
        """
        role = failed.role
        reported = (role.process.poll() or 0) > 0
        replays = self._config.buffer.replay.capacity > 0
        return role.name == "controller" and not reported and not replays

    def prepare_controller(self, failed: ProcessFailed) -> None:
        """Log the failure, wait, and prepare the run directory for another controller.

        The process is gone. Raises RoleFailed when the run must end.
        """
        restart = self._decide(failed)
        remove_controller_files(self._run_dir)
        self._wait(failed, restart, "the controller starts again under the running trainer")

    def _decide(self, failed: ProcessFailed) -> Restart:
        """Decide what follows a failure. Raises RoleFailed when the run must end."""
        self._record(failed)
        decision = decide(self._failures, self._config.restart)
        if isinstance(decision, GiveUp):
            raise self._end(failed, decision)
        return decision

    def _wait(self, failed: ProcessFailed, restart: Restart, what: str) -> None:
        limits = self._config.restart
        self._log(
            f"{failed}\n{what} in {restart.delay_s:g} s (restart {restart.number} of {limits.max} "
            f"within {limits.window_s:g} s): {failed.what}"
        )
        time.sleep(restart.delay_s)

    def _record(self, failed: ProcessFailed) -> None:
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
        if self._cause is None or failure.progressed:
            self._cause = failed

    def _end(self, failed: ProcessFailed, decision: GiveUp) -> RoleFailed:
        """Return the error that ends the run. It begins with the cause."""
        later = "" if failed is self._cause else f"\nThe last failure after it: {failed.what}"
        error = RoleFailed(f"{self._cause}{later}\nThe run ends: {decision.reason}")
        self._log(str(error), on_terminal=False)
        return error

    def _log(self, text: str, on_terminal: bool = True) -> None:
        if on_terminal:
            print(text, file=sys.stderr, flush=True)
        append_log(self._run_dir / LOGS_DIR / LOG, text)
