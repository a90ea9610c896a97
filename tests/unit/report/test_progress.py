"""The progress line: its text, its ETA, and how often it is written."""

import io
import re
import sys

import pytest

from areal_lite.report.progress import FollowedProgress, Progress, progress_line
from areal_lite.report.text import duration, pause, short
from areal_lite.run_dir.metrics import append_event


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


def test_the_eta_uses_the_pace_since_the_start():
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


@pytest.mark.parametrize("seconds, text", [(0.1421, "142 ms"), (0, "0 ms"), (1.46, "1.5 s")])
def test_pauses(seconds, text):
    assert pause(seconds) == text


def test_a_log_file_gets_a_line_every_ten_seconds_and_the_last():
    clock, stream = Clock(), io.StringIO()
    with Progress(100, "step", stream=stream, clock=clock) as progress:
        for done in range(1, 101):
            clock.now += 0.5
            progress.update(done)
    lines = stream.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == [
        f"step {n}/100" for n in (1, 21, 41, 61, 81, 100)
    ]
    assert lines[1].endswith("ETA 0:40")  # 21 steps took 10.5 s, 79 are left
    assert lines[-1].endswith("took 0:50")


def on_terminal(monkeypatch, columns: int) -> tuple[list[str], str]:
    """Return the states of a line of three updates, and everything that was written."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    with Progress(10, "step", stream=stream, clock=clock) as progress:
        for done in (1, 2, 3):
            clock.now += 1.0
            progress.update(done, reward=0.5)
            print(f"message {done}", file=sys.stderr)
    written = stream.getvalue()
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", written)
    return [line for line in re.split(r"[\r\n]+", text) if line], written


def test_a_terminal_line_stays_in_place_below_messages(monkeypatch):
    lines, written = on_terminal(monkeypatch, 80)
    states = list(dict.fromkeys(line for line in lines if "step" in line))
    assert [state[20:] for state in states] == [
        " step 1/10 · reward 0.5 · ETA 0:09",
        " step 2/10 · reward 0.5 · ETA 0:08",
        " step 3/10 · reward 0.5 · ETA 0:07",
    ]
    assert [line for line in lines if "step" not in line] == [f"message {n}" for n in (1, 2, 3)]
    assert lines[-1] == states[-1], "the last state is left on the screen"
    assert written.count("\n") == 4, "one line for each message, and one for the progress"
    assert written.endswith("\x1b[?25h"), "the cursor is back"


def test_a_narrow_terminal_has_no_bar_and_cuts_the_line(monkeypatch):
    lines, _ = on_terminal(monkeypatch, 20)
    assert [line for line in lines if "step 3" in line][-1] == "step 3/10 · reward …"


def test_a_terminal_without_cursor_movement_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress(2, "step", stream=stream) as progress:
        progress.update(1)
        progress.update(2)
    assert stream.getvalue() == "step 1/2 · ETA 0:00\nstep 2/2 · took 0:00\n"


def test_the_progress_of_another_process_continues_an_earlier_one(tmp_path, capsys):
    append_event(tmp_path, "sft", {"loss": 3.0})
    with FollowedProgress(
        tmp_path, "sft", 3, "step", lambda line: {"loss": line["loss"]}
    ) as progress:
        progress.poll()
        append_event(tmp_path, "sft", {"loss": 2.0})
        append_event(tmp_path, "sft", {"loss": 1.0})
        progress.poll()
    assert capsys.readouterr().err == "step 3/3 · loss 1 · took 0:00\n"
