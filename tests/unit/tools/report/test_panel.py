"""The panel of running work, its content for a training run, and the lines of a log."""

import io
from dataclasses import replace

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from areal_lite.config import TrainConfig
from areal_lite.run_dir.controller_status import TrainerPhase
from areal_lite.tools.formatting import duration, pause, short
from areal_lite.tools.report.panel import (
    Notice,
    Progress,
    RunState,
    View,
    ViewPanel,
    eta,
    progress_line,
    sparkline,
    step_line,
    takes_panel,
    train_view,
)
from tests.unit.run_dir.sample_status import STATUS

VIEW = View(
    title="training · runs/first",
    unit="step",
    done=34,
    total=60,
    eta_s=54.0,
    sections={
        "learning": {"reward": "0.71", "greedy accuracy": "86.1%, step 30"},
        "generation": {"servers ready": "1 of 1", "in flight": "368 of 384"},
        "speed": {"tokens": "5.6k/s"},
    },
    waits={
        "trainer": "waits for 12 of 64 groups of step 35",
        "servers": "generate: 368 requests",
    },
    notices=(
        Notice("hint", "Most groups are too easy: all their trajectories succeed"),
        Notice("warning", "05:56:40 controller: the rollout of group 12 failed"),
    ),
)
AT_80 = """\
╭─ training · runs/first ────────────────────────────────────────────────────╮
│ step 34 of 60  57%  ETA 0:54                                               │
│ ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸                                 │
│                                                                            │
│ trainer     waits for 12 of 64 groups of step 35                           │
│ servers     generate: 368 requests                                         │
│                                                                            │
│ learning                              generation                           │
│ reward           0.71                 servers ready    1 of 1              │
│ greedy accuracy  86.1%, step 30       in flight        368 of 384          │
│                                                                            │
│ speed                                                                      │
│ tokens           5.6k/s                                                    │
│                                                                            │
│ hint        Most groups are too easy: all their trajectories succeed       │
│ warning     05:56:40 controller: the rollout of group 12 failed            │
╰───────────────────────────────────────────────────────────── 1:12 elapsed ─╯
"""
AT_40 = """\
╭─ training · runs/first ────────────╮
│ step 34 of 60  57%  ETA 0:54       │
│ ━━━━━━━━━━━━━━━━━━━                │
│                                    │
│ trainer     waits for 12 of 64     │
│             groups of step 35      │
│ servers     generate: 368 requests │
│                                    │
│ learning                           │
│ reward           0.71              │
│ greedy accuracy  86.1%, step 30    │
│                                    │
│ generation                         │
│ servers ready    1 of 1            │
│ in flight        368 of 384        │
│                                    │
│ speed                              │
│ tokens           5.6k/s            │
│                                    │
│ hint        Most groups are too e… │
│ warning     05:56:40 controller: … │
╰───────────────────── 1:12 elapsed ─╯
"""


def render(view: View, columns: int, lines: int = 50, **options) -> str:
    """Return the panel as text, without color."""
    console = Console(file=io.StringIO(), width=columns, height=lines, **options)
    console.print(ViewPanel(view, 72.0))
    return console.file.getvalue()


def test_a_common_terminal():
    assert render(VIEW, 80) == AT_80


def test_a_narrow_terminal_has_one_column():
    assert render(VIEW, 40) == AT_40


@pytest.mark.parametrize("columns", [12, 25, 40, 67, 68, 72, 80, 100, 102, 120, 300])
def test_every_line_has_the_same_width(columns):
    widths = {cell_len(line) for line in render(VIEW, columns).splitlines()}
    assert widths == {min(columns - 2, 100)}


@pytest.mark.parametrize("columns", range(1, 12))
def test_no_line_is_wider_than_the_terminal(columns):
    assert max(cell_len(line) for line in render(VIEW, columns).splitlines()) <= columns


def test_a_wide_terminal_shows_the_same_rows():
    at_80, at_120 = (render(VIEW, columns).splitlines() for columns in (80, 120))
    assert [line.split() for line in at_80[3:-1]] == [line.split() for line in at_120[3:-1]]


@pytest.mark.parametrize("lines", range(1, 20))
@pytest.mark.parametrize("columns", [40, 80])
def test_a_low_terminal_keeps_the_bar_and_the_waits(columns, lines):
    shown = render(VIEW, columns, lines)
    assert "step 34 of 60" in shown
    assert shown.count("\n") <= max(lines, 4)
    if lines >= 9:
        assert "generate: 368 requests" in shown


def test_notices_go_first_and_one_by_one():
    assert "hint" in render(VIEW, 80, 17) and "warning" not in render(VIEW, 80, 17)
    assert "tokens" in render(VIEW, 80, 16) and "hint" not in render(VIEW, 80, 16)
    assert "tokens" not in render(VIEW, 80, 14)


def test_colors_add_nothing_that_the_text_lacks():
    colored = render(VIEW, 80, force_terminal=True, color_system="truecolor")
    plain = render(VIEW, 80, force_terminal=True, color_system=None)
    assert "\x1b[36m" in colored
    for text in ("57%", "hint", "warning", "step 34 of 60"):
        assert text in plain


def test_text_of_a_log_moves_no_cursor_and_starts_no_line():
    text = "a\x1b[2Jb\r\nc [bold]d[/bold] \u202ee"
    shown = render(replace(VIEW, notices=[Notice("warning", text)]), 80)
    assert "a\\x1b[2Jb c [bold]d[/bold] \\u202ee" in shown
    assert len(shown.splitlines()) == len(AT_80.splitlines()) - 1


def test_a_view_without_numbers():
    view = View(title="rollouts", unit="group", done=0, total=0)
    assert "group 0 of 0" in render(view, 80)


@pytest.mark.parametrize(
    "values, text",
    [
        ([], ""),
        ([0.3], "▁"),
        ([0.3, 0.3], "▁▁"),
        ([0, 1], "▁█"),
        ([1, 0, 0.5], "█▁▅"),
        ([0, 0, 1, 1, 4, 4], "▁▃█"),
        (range(8), "▁▅█"),
    ],
)
def test_sparkline(values, text):
    assert sparkline(values, 3) == text


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
    step = {"reward_mean": 0.71, "staleness_mean": 1.2, "tokens": 8200, "time_s": 2.0}
    said = step_line(step | {"pause_s": None})
    assert line(12, 60, eta_s=130.0, line=said) == (
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


STEP = {
    "step": 7,
    "time_s": 2.0,
    "wait_s": 0.5,
    "reward_mean": 0.5,
    "tokens": 3000,
    "trajectories": 64,
    "staleness_mean": 1.25,
    "staleness_max": 4,
    "pause_s": 0.032,
    "clip_fraction": 0.0042,
    "behavior_weight": 0.98,
    "weight_max": 1.31,
}


def config(**changes) -> TrainConfig:
    made = TrainConfig(model="model", run_dir="runs/first")
    made.trainer.steps, made.trainer.batch_groups = 20, 8
    made.buffer.max_staleness, made.server.count = 4, 2
    for key, value in changes.items():
        setattr(made, key, value)
    return made


RUN = RunState(
    config=config(),
    steps=[STEP | {"step": 6, "time_s": 4.0}, STEP],
    rewards=[0.0, 0.5],
    evaluation={"version": 5, "greedy": 0.875, "sampled": 0.75},
    status=STATUS,
    since_step_s=1.0,
)

WAITS = "waits for 3 of 8 groups of step 8"


def values(view: View) -> dict[str, str]:
    """Return the values of all rows by name."""
    rows = {name: value for rows in view.sections.values() for name, value in rows.items()}
    return {**rows, **view.waits}


def test_every_number_of_a_run():
    view = train_view(RUN)
    assert (view.done, view.total, view.title) == (7, 20, "training · runs/first")
    assert view.eta_s == 13 * 3.0 - 1.0
    assert values(view) == {
        "reward": "0.5 ▁█",
        "greedy accuracy": "87.5%, step 5",
        "sampled accuracy": "75.0%, step 5",
        "servers ready": "1 of 2",
        "in flight": "16 of 32",
        "pause of a push": "32 ms",
        "tokens": "1k/s",
        "trajectories": "21.3/s",
        "a step": "3 s, waits 17%",
        "staleness": "mean 1.25, max 4",
        "clipped": "0.42% of tokens",
        "behavior weight": "mean 0.98, max 1.31",
        "trainer": WAITS,
        "servers": "generate: 15 requests, evaluation included",
        "evaluation": "of step 4: 118 of 400 answers",
    }


def test_the_reward_of_each_data_source():
    sources = {f"reward_mean/{name}": value for name, value in zip("abcde", (0.25, None, 1, 0, 0))}
    shown = values(train_view(replace(RUN, steps=[STEP, STEP | sources])))
    assert list(shown)[:5] == ["reward", "  a", "  b", "  c", "  d"], "the first four"
    assert (shown["  a"], shown["  b"], shown["  c"]) == ("0.25", "–", "1")


def test_a_judge_has_a_row():
    counts = {"judge_calls": 128, "judge_cached": 3, "judge_tokens": 13016}
    step = {**STEP, **counts, "judge_p50_s": 1.25, "judge_p99_s": None}
    shown = values(train_view(replace(RUN, steps=[step])))
    assert shown["judge"] == "128 calls, 3 known, 1.25 to – s, 13k tokens"
    assert "judge" not in values(train_view(RUN))


def test_the_pace_leaves_out_the_first_step():
    first, second = {**STEP, "step": 1, "time_s": 60.0}, {**STEP, "step": 2}
    assert train_view(replace(RUN, steps=[first])).eta_s is None
    both = train_view(replace(RUN, steps=[first, second]))
    assert both.eta_s == 18 * 2.0 - 1.0
    assert values(both)["a step"].startswith("2 s")


def test_before_the_first_step_nothing_is_known():
    view = train_view(RunState(config=config()))
    assert (view.done, view.eta_s, view.line) == (0, None, ())
    shown = values(view)
    assert shown.pop("trainer") == "loads the model"
    assert shown.pop("servers") == "start"
    assert {text.strip() for text in shown.values()} == {"–"}


def test_what_a_step_does_not_have_is_unknown():
    shown = values(train_view(replace(RUN, steps=[{**STEP, "pause_s": None, "wait_s": None}])))
    assert shown["pause of a push"] == "–" and shown["a step"] == "2 s"
    lean = {key: STEP[key] for key in STEP if key not in ("clip_fraction", "behavior_weight")}
    shown = values(train_view(replace(RUN, steps=[lean])))
    assert shown["clipped"] == shown["behavior weight"] == "–"


@pytest.mark.parametrize(
    "changes, trainer, servers",
    [
        (
            {"trainer": TrainerPhase.LOADING},
            "loads the model",
            "generate: 15 requests, evaluation included",
        ),
        (
            {"trainer": TrainerPhase.TRAINING},
            "trains on step 8",
            "generate: 15 requests, evaluation included",
        ),
        (
            {"trainer": TrainerPhase.PUSHING},
            "pushes its weights to the servers",
            "take new weights",
        ),
        (
            {"servers_announced": 0, "servers_ready": 0},
            "waits for 3 of 8 groups of step 8",
            "start",
        ),
        (
            {"servers_ready": 0},
            "waits for 3 of 8 groups of step 8",
            "wait for the weights of step 7",
        ),
        (
            {"trainer": TrainerPhase.TRAINING, "capacity": 0},
            "trains on step 8",
            "finish 15 requests; new ones would only get stale",
        ),
        (
            {"trainer": TrainerPhase.TRAINING, "capacity": 0, "version": 15, "step": 15},
            "trains on step 16",
            "finish 15 requests; no more are needed",
        ),
        (
            {"trainer": TrainerPhase.TRAINING, "capacity": 0, "requests": 0, "version": 6},
            "trains on step 8",
            "idle; new ones would only get stale",
        ),
        (
            {"trainer": TrainerPhase.TRAINING, "capacity": None, "requests": 0},
            "trains on step 8",
            "have no requests: rewards or tools are at work",
        ),
    ],
)
def test_who_waits_for_what(changes, trainer, servers):
    status = msgspec.structs.replace(STATUS, **changes)
    shown = values(train_view(replace(RUN, status=status)))
    assert (shown["trainer"], shown["servers"]) == (trainer, servers)


def test_requests_are_in_flight_only_on_servers():
    for changes, flying, servers in (
        ({}, "16 of 32", "generate: 15 requests"),
        ({"servers_ready": 0, "servers_announced": 0}, "16 wait for a server", "start"),
    ):
        status = msgspec.structs.replace(STATUS, evaluating=[], **changes)
        shown = values(train_view(replace(RUN, status=status)))
        assert (shown["in flight"], shown["servers"]) == (flying, servers)


def test_the_end_of_a_run():
    view = train_view(replace(RUN, steps=[{**STEP, "step": 20}], status=None))
    assert (view.done, view.eta_s) == (20, None)
    assert values(view)["trainer"] == "all steps done, saves the model"
    assert values(view)["servers"] == "stop"


def test_a_run_without_servers_shows_none():
    view = train_view(replace(RUN, config=config(debug="train_only"), status=None))
    assert list(view.sections) == [
        "learning",
        "speed",
        "decoupled PPO, staleness up to 4",
    ]
    assert view.waits == {"trainer": "trains on step 8"}


def test_other_objectives_have_off_policy_data_too():
    other = config()
    other.algo.loss = "tb"
    titles = list(train_view(replace(RUN, config=other)).sections)
    assert titles[-1] == "off-policy data, staleness up to 4"
    other.buffer.replay.capacity = 8
    titles = list(train_view(replace(RUN, config=other)).sections)
    assert titles[-1] == "off-policy data, of any age"


def test_a_long_step_is_given_in_minutes():
    shown = values(train_view(replace(RUN, steps=[{**STEP, "time_s": 130.0}])))
    assert shown["a step"] == "2:10, waits 0%"


def test_the_line_of_a_step_without_a_push():
    step = {"reward_mean": 0.5, "staleness_mean": None, "tokens": 300, "time_s": 1.5}
    assert step_line(step | {"pause_s": None}) == ["reward 0.5", "200 tok/s"]
    assert step_line(step | {"pause_s": 0.04}) == ["reward 0.5", "200 tok/s", "pause 40 ms"]


@pytest.mark.parametrize(
    "times_s, left, since_s, expected",
    [([], 5, 0, None), ([2, 4], 5, 1, 14), ([2], 0, 0, None), ([2], 1, 5, 0)],
)
def test_eta(times_s, left, since_s, expected):
    assert eta(times_s, left, since_s) == expected
