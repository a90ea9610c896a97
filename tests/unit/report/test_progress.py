"""The progress line: its text, its ETA and how often it is written."""

import io

import pytest

from areal_lite.report.progress import Progress, duration, progress_line, short


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_line_as_documented():
    line = progress_line(
        "step", 12, 60, 32.5, {"reward": 0.71, "staleness": 1.2, "tok_per_s": 4100, "eval": None}
    )
    assert line == "step 12/60 · reward 0.71 · staleness 1.2 · 4.1k tok/s · ETA 2:10"


def test_the_pace_is_that_of_what_was_done_since():
    assert progress_line("step", 12, 60, 32.5, {}, before=2) == "step 12/60 · ETA 2:36"
    assert progress_line("step", 2, 60, 32.5, {}, before=2) == "step 2/60"


def test_no_eta_before_the_first_and_none_after_the_last():
    assert progress_line("problem", 0, 5, 3.0, {}) == "problem 0/5"
    assert progress_line("problem", 5, 5, 61.0, {}) == "problem 5/5 · took 1:01"


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (0.71, "0.71"),
        (1.2, "1.2"),
        (1.0, "1"),
        (0.0004, "0.0004"),
        (-0.0004, "-0.0004"),
        (12.346, "12.35"),
        (340.4, "340"),
    ]
    + [
        (4100, "4.1k"),
        (2000, "2k"),
        (-2500, "-2.5k"),
        (3.94e6, "3.9M"),
        (2e9, "2G"),
        ("12 ms", "12 ms"),
        (True, "True"),
    ],
)
def test_short_numbers(value, text):
    assert short(value) == text


@pytest.mark.parametrize(
    "seconds, text", [(0, "0:00"), (59.6, "1:00"), (130, "2:10"), (3725, "1:02:05")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_a_log_file_gets_a_line_every_ten_seconds_and_the_last():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(100, "step", stream, clock)
    for done in range(1, 101):
        clock.now += 0.5
        progress.update(done)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == [
        f"step {n}/100" for n in (1, 21, 41, 61, 81, 100)
    ]
    assert lines[1].endswith("ETA 0:40")  # 21 steps took 10.5 s, 79 are left
    assert lines[-1].endswith("took 0:50")


def test_a_terminal_line_is_rewritten_in_place_and_fits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    clock, stream = Clock(), Terminal()
    progress = Progress(10, "step", stream, clock)
    for done in (1, 2, 3):
        clock.now += 1.0
        progress.update(done, reward="x" * 50)
    assert "\n" not in stream.getvalue()
    lines = stream.getvalue().split("\r")[1:]
    assert [line[:9] for line in lines] == ["step 1/10", "step 2/10", "step 3/10"]
    assert all(len(line.removesuffix("\x1b[K")) == 29 for line in lines)
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("\x1b[K\n") and stream.getvalue().count("\n") == 1
