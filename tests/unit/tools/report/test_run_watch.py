"""The panel of a run comes from its files, as they grow."""

import os
import time

import pytest

from areal_lite.config import TrainConfig, save_config
from areal_lite.run_dir.controller_status import write_status
from areal_lite.run_dir.metrics import STEP_KEYS, append_event
from areal_lite.tools.diagnose.history import read_history
from areal_lite.tools.report import run_watch
from areal_lite.tools.report.panel import Notice
from areal_lite.tools.report.run_watch import CONSOLE, RunWatch, warning_notices
from tests.unit.run_dir.sample_status import STATUS
from tests.unit.tools.report.recorded_run import unpack
from tests.unit.tools.report.synthetic_run import T0, hand_made

LINE = "2026-01-02 03:04:05,678 {} {}: {}\n"


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def step(run_dir, number: int, **changes) -> None:
    append_event(run_dir, "metrics", {**dict.fromkeys(STEP_KEYS, 1), "step": number, **changes})


def watch(run_dir) -> RunWatch:
    return RunWatch(TrainConfig(model="model", run_dir=str(run_dir)), run_dir)


def rows(view) -> dict[str, str]:
    return {name: value for rows in view.sections.values() for name, value in rows.items()}


def test_steps_evaluations_and_status_as_they_come(run_dir):
    run = watch(run_dir)
    assert run.view().done == 0
    step(run_dir, 1, reward_mean=0.25)
    step(run_dir, 2, reward_mean=None)
    step(run_dir, 3, reward_mean=0.75)
    append_event(run_dir, "evals", {"version": 0, "greedy": 0.1, "sampled": None})
    write_status(run_dir, STATUS)
    view = run.view()
    assert view.done == 3 and view.eta_s == pytest.approx(97, abs=0.5)
    assert rows(view)["reward"] == "0.75 ▁█"
    assert rows(view)["greedy accuracy"] == "10.0%, step 0"
    assert rows(view)["in flight"] == "16 of 32"
    append_event(run_dir, "evals", {"version": 3, "greedy": 0.2, "sampled": 0.3})
    assert rows(run.view())["sampled accuracy"] == "30.0%, step 3"


def test_a_resumed_run_knows_its_steps(run_dir):
    for number in range(1, 31):
        step(run_dir, number, reward_mean=number)
    view = watch(run_dir).view()
    assert view.done == 30 and view.eta_s == 70
    assert rows(view)["reward"] == "30 ▁▂▃▃▄▅▆▆▇█"


def warnings(run_dir) -> list[Notice]:
    save_config(TrainConfig(model="model", run_dir=str(run_dir)), run_dir)
    started_at = time.mktime(time.strptime("2026-01-02 03:04:00", "%Y-%m-%d %H:%M:%S"))
    os.utime(run_dir / "config.yaml", (started_at, started_at))
    return warning_notices(read_history(run_dir))


def test_warnings_of_this_start_the_newest_first(run_dir):
    log, trainer = run_dir / "logs" / "controller.log", run_dir / "logs" / "trainer-1.log"
    earlier = LINE.format("WARNING", "areal_lite.x", "of an earlier start")
    log.write_text(earlier.replace("03:04:05", "03:03:59"))
    (run_dir / "logs" / "server-0.log").write_text(LINE.format("ERROR", "areal_lite.x", "no role"))
    assert warnings(run_dir) == []
    with open(log, "a") as file:
        file.write(LINE.format("WARNING", "areal_lite.x", "one"))
        file.write(LINE.format("INFO", "areal_lite.x", "fine"))
        file.write(LINE.format("WARNING", "megatron.core", "not ours"))
        file.write("Traceback (most recent call last):\n")
    trainer.write_text(LINE.format("ERROR", "__main__", "two") + "2026-01-02 03:04:06,7 WARNING ar")
    one = Notice("warning", "03:04:05 controller: one")
    two = Notice("error", "03:04:05 trainer-1: two")
    assert warnings(run_dir) == [two, one]
    with open(trainer, "a") as file:
        file.write("eal_lite.y: \xff three\n")
    three = Notice("warning", "03:04:06 trainer-1: \xff three")
    assert warnings(run_dir) == [three, two]


def test_a_flood_of_warnings_is_not_read_whole(run_dir):
    line = LINE.format("WARNING", "areal_lite.x", "again")
    (run_dir / "logs" / "controller.log").write_text(line * 100_000)
    started = time.monotonic()
    assert len(warnings(run_dir)) == 2
    assert time.monotonic() - started < 1.0


def test_findings_come_from_a_diagnosis_that_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(run_watch, "_LOOK_INTERVAL_S", 0.0)
    folder = unpack("async", tmp_path)
    run = RunWatch(TrainConfig(model="model", run_dir="runs/async"), folder)
    deadline = time.monotonic() + 30
    while not (notices := run.view().notices):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert notices[0] == ("hint", "Most groups are too easy: all their trajectories succeed")
    assert notices[-1] == ("remedy", f"areal-lite diagnose {folder}")
    (folder / "config.yaml").write_text("[")  # what cannot be read changes nothing
    for _ in range(20):
        assert run.view().notices == notices
        time.sleep(0.02)


def test_paths_are_printed_as_they_are(tmp_path, capsys):
    """Brackets are no markup, and words between colons no pictures."""
    run_dir = tmp_path / "grid[lr]" / "a:fire:b"
    run_dir.mkdir(parents=True)
    config = hand_made(run_dir)
    (run_dir / "evals.jsonl").unlink()
    CONSOLE.report(run_dir, CONSOLE.summarize(config, run_dir, T0, T0 + 20))
    printed = capsys.readouterr().err
    assert f"run directory: {run_dir}\n" in printed and f"{run_dir}/report.html" in printed
