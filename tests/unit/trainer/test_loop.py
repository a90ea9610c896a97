"""Which of the pusher's calls a step makes, at a cadence of three steps."""

from areal_lite.trainer.cadence import Cadence
from areal_lite.trainer.loop import TrainingRun
from areal_lite.weights.push import Pusher


class Calls(Pusher):
    """A pusher that writes down its calls."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int]] = []

    def push_all(self, version: int) -> None:
        self.made.append(("all", version))

    def push_stale(self, version: int) -> None:
        self.made.append(("stale", version))

    def skip(self, step: int) -> None:
        self.made.append(("skip", step))


def run_at(step: int) -> tuple[TrainingRun, Calls]:
    """Return a run that resumed from the checkpoint of `step`, without its models."""
    run, calls = TrainingRun.__new__(TrainingRun), Calls()
    run.cadence = Cadence(every=3, eval_every=0, steps=8)
    run.done = run.pushed = step
    run.pusher = calls
    return run, calls


def end_steps(run: TrainingRun) -> list[int]:
    """End the steps that are left; return the version of the servers after each."""
    versions = []
    for done in range(run.done + 1, 9):
        run.done = done
        run._push_if_due()
        versions.append(run.pushed)
    return versions


def test_every_third_step_and_the_last_one_are_pushed() -> None:
    run, calls = run_at(0)
    assert end_steps(run) == [0, 0, 3, 3, 3, 6, 6, 8]
    assert [step for kind, step in calls.made if kind == "all"] == [3, 6, 8]
    assert [step for kind, step in calls.made if kind == "skip"] == [1, 2, 4, 5, 7]


def test_a_run_that_resumes_between_two_pushes_keeps_the_cadence() -> None:
    run, calls = run_at(4)
    run._resync(4)
    assert end_steps(run) == [4, 6, 6, 8]
    assert calls.made == [("stale", 4), ("skip", 5), ("all", 6), ("skip", 7), ("all", 8)]


def test_a_resync_between_two_pushes_goes_to_all_servers() -> None:
    run, calls = run_at(3)
    run._resync(3)
    run.done = 4
    run._push_if_due()
    run._resync(4)
    run._resync(4)
    assert calls.made == [("stale", 3), ("skip", 4), ("all", 4), ("stale", 4)] and run.pushed == 4
