"""The progress of a run on a terminal: the panel stays whole, and leaves nothing behind."""

import re
import subprocess
import sys

import pytest

from tests.terminal import ROOT, Terminal

BORDER = "╭╰│"


def replay(tmp_path, steps: int) -> list[str]:
    """Return the command of a run that is played."""
    return [
        sys.executable,
        "-m",
        "tests.unit.tools.report.replayed_run",
        f"{tmp_path / 'run'}",
        f"{steps}",
    ]


def check_whole(text: str) -> None:
    """Check that at most one panel is to be seen, at the bottom, with no other line in it."""
    lines = text.splitlines()
    if not any(border in text for border in BORDER):
        return
    top = next(i for i, line in enumerate(lines) if "╭" in line)
    assert lines[top].startswith("╭─ training · ") and lines[-1].startswith("╰"), text
    assert lines[-1].endswith(" elapsed ─╯"), text
    for line in lines[top + 1 : -1]:
        assert line.startswith("│ ") and line.endswith(" │"), text
    assert not any(border in line for line in lines[:top] for border in BORDER), text


@pytest.mark.parametrize("columns, lines", [(80, 24), (40, 30), (120, 9)])
def test_messages_scroll_by_above_the_panel(tmp_path, columns, lines):
    panels, title = 0, ""
    with Terminal(replay(tmp_path, 12), columns, lines) as terminal:
        while terminal.read():
            if terminal.screen.title != title:  # a step is complete
                title = terminal.screen.title
                check_whole(terminal.everything())
                panels += "╭" in terminal.shown()
        assert terminal.process.wait(30) == 0
    assert panels == 12, terminal.everything()
    left = terminal.everything()
    assert not any(border in left for border in BORDER), left
    messages = "".join(f"message {n} {'of many words ' * 4}result {n} " for n in (4, 8, 12))
    end = "step 12/12 · reward 1 · staleness 1 · 1 tok/s · pause 32 ms · took "
    assert " ".join(left.split()).startswith(f"server-0 is ready 1 s after start {messages}{end}")
    assert left.endswith("\nsummary.json")
    assert not terminal.screen.cursor.hidden


def test_ctrl_c_leaves_a_clean_terminal(tmp_path):
    with Terminal(replay(tmp_path, 1000)) as terminal:
        terminal.wait_for(lambda screen: re.search(r"group \d+ failed", screen))
        terminal.press(b"\x03")
        assert terminal.finish() == 130
    left = terminal.everything().splitlines()
    assert not any(border in line for line in left for border in BORDER), left
    assert left[-1] == "interrupted" and left[-2].startswith("step ")
    assert not terminal.screen.cursor.hidden


def test_a_smaller_terminal_gets_a_smaller_panel(tmp_path):
    with Terminal(replay(tmp_path, 1000), 120, 40) as terminal:
        terminal.wait_for(lambda screen: "step 8 of" in screen)
        terminal.resize(60, 30)
        terminal.wait_for(lambda screen: len(screen.splitlines()[-1]) == 58)
        check_whole(terminal.shown())
        terminal.press(b"\x03")
        assert terminal.finish() == 130
    assert not any(border in terminal.shown() for border in BORDER)


def test_a_pipe_gets_plain_lines(tmp_path):
    done = subprocess.run(
        replay(tmp_path, 12), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    lines = done.stderr.splitlines()
    assert lines[0] == "server-0 is ready 1 s after start"
    assert lines[1] == "step 1/12 · reward 1 · staleness 1 · 1 tok/s · pause 32 ms", "no pace yet"
    assert lines[-1].startswith("step 12/12 · reward 1 · ")
    assert len(lines) == 6, "one message, three with steps, and two lines of progress"
    assert done.stdout.splitlines() == ["result 4", "result 8", "result 12", "summary.json"]
