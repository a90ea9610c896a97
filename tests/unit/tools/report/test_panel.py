"""The panel: what it looks like at each size of the terminal."""

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from areal_lite.tools.report.panel import Notice, Row, Section, View, ViewPanel, sparkline

VIEW = View(
    title="training · runs/first",
    unit="step",
    done=34,
    total=60,
    eta_s=54.0,
    sections=(
        Section("learning", [Row("reward", "0.71"), Row("greedy accuracy", "86.1%, step 30")]),
        Section("generation", [Row("servers ready", "1 of 1"), Row("in flight", "368 of 384")]),
        Section("speed", [Row("tokens", "5.6k/s")]),
    ),
    waits=(
        Row("trainer", "waits for 12 of 64 groups of step 35"),
        Row("servers", "generate: 368 requests"),
    ),
    notices=(
        Notice("hint", "Most groups are too easy: all their trajectories succeed"),
        Notice("warning", "05:56:40 controller: the rollout of group 12 failed"),
    ),
)
AT_80 = """\
╭─ training · runs/first ────────────────────────────────────────────────────╮
│ step 34 of 60  ━━━━━━━━━━━━━━━━━━━━━━━━╸                     57%  ETA 0:54 │
│                                                                            │
│ learning                              generation                           │
│ reward           0.71                 servers ready    1 of 1              │
│ greedy accuracy  86.1%, step 30       in flight        368 of 384          │
│                                                                            │
│ speed                                                                      │
│ tokens           5.6k/s                                                    │
│                                                                            │
│ trainer     waits for 12 of 64 groups of step 35                           │
│ servers     generate: 368 requests                                         │
│                                                                            │
│ hint        Most groups are too easy: all their trajectories succeed       │
│ warning     05:56:40 controller: the rollout of group 12 failed            │
╰───────────────────────────────────────────────────────────── 1:12 elapsed ─╯
"""
AT_40 = """\
╭─ training · runs/first ────────────╮
│ step 34 of 60  ETA 0:54            │
│ ━━━━━━━━━━━━━━━━               57% │
│                                    │
│ reward           0.71              │
│ greedy accuracy  86.1%, step 30    │
│ servers ready    1 of 1            │
│ in flight        368 of 384        │
│ tokens           5.6k/s            │
│                                    │
│ trainer     waits for 12 of 64     │
│             groups of step 35      │
│ servers     generate: 368 requests │
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
    assert [line.split() for line in at_80[2:-1]] == [line.split() for line in at_120[2:-1]]


@pytest.mark.parametrize("lines", range(1, 20))
@pytest.mark.parametrize("columns", [40, 80])
def test_a_low_terminal_keeps_the_bar_and_the_waits(columns, lines):
    shown = render(VIEW, columns, lines)
    assert "step 34 of 60" in shown
    assert shown.count("\n") <= max(lines, 4)
    if lines >= 9:
        assert "generate: 368 requests" in shown


def test_notices_go_first_and_one_by_one():
    assert "hint" in render(VIEW, 80, 15) and "warning" not in render(VIEW, 80, 15)
    assert "tokens" in render(VIEW, 80, 14) and "hint" not in render(VIEW, 80, 14)
    assert "tokens" not in render(VIEW, 80, 12)


def test_colors_add_nothing_that_the_text_lacks():
    colored = render(VIEW, 80, force_terminal=True, color_system="truecolor")
    plain = render(VIEW, 80, force_terminal=True, color_system=None)
    assert "\x1b[36m" in colored
    for text in ("57%", "hint", "warning", "step 34 of 60"):
        assert text in plain


def test_text_of_a_log_moves_no_cursor_and_starts_no_line():
    text = "a\x1b[2Jb\r\nc [bold]d[/bold] \u202ee"
    shown = render(replace(VIEW, notices=[Notice("warning", text)]), 80)
    assert "a\\x1b[2Jb c [bold]d[/bold] \\x202ee" in shown
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
