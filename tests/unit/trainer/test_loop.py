"""The loop pushes, saves checkpoints and ends in the right order."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lite.config import TrainConfig
from areal_lite.trainer import loop
from areal_lite.trainer.loop import TrainingRun
from areal_lite.weights.push import Pusher
from areal_lite_quickstart import sft_rank


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
    run.config = TrainConfig(model="m")
    run.config.sync.every, run.config.trainer.steps = 3, 8
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


class Saved:
    """Checkpoints that only write down their steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def save(self, step: int, extra: dict) -> None:
        self.steps.append(step)


@pytest.fixture
def saved_steps(tmp_path: Path, monkeypatch):
    """saved_steps(every, seconds) -> the steps with a checkpoint, of 11 of that length."""
    now = [1000.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(loop, "on_every_rank", lambda condition: condition)

    def train(every: int, seconds: float) -> list[int]:
        run = TrainingRun.__new__(TrainingRun)
        run.config, run.run_dir = TrainConfig(model="m"), tmp_path
        run.config.trainer.steps = 12
        run.config.trainer.save_every = every
        saved = Saved()
        run.checkpoints, run.saved_at = saved, now[0]
        for step in range(1, 12):
            now[0] += seconds
            run.done = step
            assert not run.save_and_stop()
        return saved.steps

    return train


def test_checkpoints_are_due_by_steps_or_by_time(saved_steps) -> None:
    assert saved_steps(every=0, seconds=10) == []
    assert saved_steps(every=4, seconds=10) == [4, 8]
    assert saved_steps(every=4, seconds=1000) == [4, 8]
    assert saved_steps(every=0, seconds=500) == [4, 8], "each one starts the time anew"


def test_a_run_ends_after_steps_in_a_row_that_were_skipped(tmp_path: Path, monkeypatch) -> None:
    saved: list[str] = []
    monkeypatch.setattr(loop, "save_batch", lambda batch, path: saved.append(path.name))
    monkeypatch.setattr(loop.dist, "get_rank", lambda: 1)
    run = TrainingRun.__new__(TrainingRun)
    run.run_dir, run.skipped = tmp_path, 0
    for step, skipped in enumerate((1.0, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0)):
        run._record_skipped(step, None, skipped)
    with pytest.raises(FloatingPointError, match="5 steps in a row, up to step 8"):
        run._record_skipped(7, None, 1.0)
    assert saved == [f"step-{step}-rank-1.msgpack" for step in (1, 2, 4, 5, 6, 7, 8)]


@pytest.mark.parametrize("module", [loop, sft_rank])
def test_garbage_is_collected_once_a_rank_has_its_imports(monkeypatch, module) -> None:
    assert gc.isenabled(), "who imports the module keeps a garbage collector"
    monkeypatch.setattr(module, "die_with_parent", lambda: None)
    monkeypatch.setattr("areal_lite.system.heartbeat.start", lambda phase: None)
    monkeypatch.setattr(module, "run_role", lambda *_: gc.isenabled())
    gc.disable()
    try:
        assert module.main()
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_answer_before_the_controller_ends(monkeypatch, tmp_path, rank) -> None:
    happened: list[str] = []

    def note(what: str):
        return lambda *args: happened.append(what)

    monkeypatch.setattr(loop.heartbeat, "enter", lambda what: None)
    monkeypatch.setattr(loop, "on_every_rank", lambda value: value)
    monkeypatch.setattr(loop, "shutdown", note("shutdown"))
    monkeypatch.setattr(loop.dist, "barrier", note("all ranks"))
    run: Any = object.__new__(TrainingRun)
    run.config, run.run_dir, run.start, run.done = TrainConfig(), tmp_path, 7, 7
    run.checkpoints = SimpleNamespace(wait=lambda: None)
    run.controller = SimpleNamespace(await_evaluation=note("answer"))
    run.pusher = SimpleNamespace(close=lambda: None)
    last = SimpleNamespace(evaluates_last=True, finish=note("end of the controller"))
    run.reporter = None if rank else last
    run.finish()
    end = ["end of the controller"] * (rank == 0)
    assert happened == ["answer", "all ranks", *end, "shutdown"]
