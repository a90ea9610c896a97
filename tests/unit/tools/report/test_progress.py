"""The progress of work: its line, how often it is written, and where a panel takes its place."""

import io

import pytest
from rich.console import Console

from areal_lite.tools.report.panel import View
from areal_lite.tools.report.progress import Progress, progress_line, takes_panel
from areal_lite.tools.report.text import duration, pause, short


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Work:
    """Work that goes on, and its view."""

    done = 0

    def __init__(self, total: int, unit: str = "step"):
        self.total = total
        self.unit = unit

    def view(self) -> View:
        left = float(self.total - self.done)
        return View(title="work", unit=self.unit, done=self.done, total=self.total, eta_s=left)


@pytest.fixture(autouse=True)
def at_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)


def line(done: int, total: int, elapsed_s: float = 3.0, **changes) -> str:
    view = View(title="", unit="step", done=done, total=total, **changes)
    return progress_line(view, elapsed_s)


def test_the_line_as_documented():
    values = {"reward": 0.71, "staleness": 1.2, "tok_per_s": 4100, "eval": None}
    assert line(12, 60, eta_s=130.0, line=values) == (
        "step 12/60 · reward 0.71 · staleness 1.2 · 4.1k tok/s · ETA 2:10"
    )


def test_no_eta_before_the_first_and_none_after_the_last():
    assert line(0, 5) == "step 0/5"
    assert line(5, 5, 61.0, eta_s=0.0) == "step 5/5 · took 1:01"


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (0.71, "0.71"),
        (1.2, "1.2"),
        (1.0, "1"),
        (0.0004, "0.0004"),
        (-0.0004, "-0.0004"),
        (12.346, "12.3"),
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


def test_a_log_gets_a_line_every_ten_seconds_and_the_last():
    clock, stream, work = Clock(), io.StringIO(), Work(100)
    with Progress(work.view, stream=stream, clock=clock) as progress:
        for work.done in range(1, 101):
            clock.now += 0.5
            progress.poll()
    lines = stream.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == [
        f"step {n}/100" for n in (2, 22, 42, 62, 82, 100)
    ]
    assert lines[1].endswith("ETA 1:18")
    assert lines[-1].endswith("took 0:50")


def test_a_log_gets_no_line_without_progress():
    clock, stream, work = Clock(), io.StringIO(), Work(10)
    work.done = 3  # by an earlier process
    with Progress(work.view, stream=stream, clock=clock) as progress:
        for _ in range(100):
            clock.now += 1.0
            progress.poll()
        assert stream.getvalue() == ""
        work.done = 4
        clock.now += 1.0
        progress.poll()
        assert stream.getvalue() == "step 4/10 · ETA 0:06\n"
    assert stream.getvalue() == "step 4/10 · ETA 0:06\n", "no line twice"


def test_the_view_is_asked_for_at_most_once_a_second():
    clock, work, asked = Clock(), Work(10), []
    with Progress(lambda: asked.append(clock.now) or work.view(), clock=clock) as progress:
        for _ in range(40):
            clock.now += 0.125
            progress.poll()
    assert asked == [100, 101, 102, 103, 104, 105, 105]


@pytest.mark.parametrize(
    "name, value, panel",
    [("TERM", "xterm", True), ("TERM", "dumb", False), ("CI", "true", False), ("CI", "", True)],
)
def test_which_terminals_take_a_panel(monkeypatch, name, value, panel):
    monkeypatch.setenv(name, value)
    assert takes_panel(Console(file=Terminal())) == panel
    assert not takes_panel(Console(file=io.StringIO()))


def test_a_terminal_without_cursor_movement_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    clock, stream, work = Clock(), Terminal(), Work(2)
    with Progress(work.view, stream=stream, clock=clock) as progress:
        for work.done in (1, 2):
            clock.now += 15
            progress.poll()
    assert stream.getvalue() == "step 1/2 · ETA 0:01\nstep 2/2 · took 0:30\n"
