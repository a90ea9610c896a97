"""A progress line with an ETA.

    ━━━━━━━╺━━━━━━━━━━━━ step 12/60 · reward 0.71 · staleness 1.2 · 4.1k tok/s · ETA 2:10

* On a terminal the line stays in place, and messages to stderr scroll by above it.
* A log file gets a new line, without the bar, at most every ten seconds, and always the last one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_lite.report.text import duration, short
from areal_lite.run_dir.metrics import read_events

_LOG_INTERVAL_S = 10.0
_POLL_INTERVAL_S = 1.0
_BAR_WIDTH = 20


class Progress:
    """The progress of a piece of work. A context manager: leaving it ends the line."""

    def __init__(
        self,
        total: int,
        unit: str,
        *,
        before: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Start the clock. The ETA assumes the mean pace since then.

        Args:
            total: units of work, those of earlier processes included.
            unit: the name of a unit, such as "step".
            before: units that earlier processes completed.
            stream: the terminal or log file to write to; stderr by default.
            clock: returns seconds.
        """
        self._total = total
        self._unit = unit
        self._before = before
        self._stream = stream or sys.stderr
        self._clock = clock
        self._started_at = clock()
        self._written_at: float | None = None
        console = Console(file=self._stream)
        on_terminal = self._stream.isatty() and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if on_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, done: int, **fields: Any) -> None:
        """Show that `done` units are complete.

        A field reads `name value`, except `tok_per_s`, which reads `4.1k tok/s`. A field that is
        None is left out.
        """
        now = self._clock()
        elapsed_s = now - self._started_at
        line = progress_line(self._unit, done, self._total, elapsed_s, fields, self._before)
        if self._live:
            columns = self._live.console.width
            self._live.update(_with_bar(done, self._total, line, columns), refresh=True)
        elif done >= self._total or self._is_due(now):
            self._written_at = now
            print(line, file=self._stream, flush=True)

    def _is_due(self, now: float) -> bool:
        return self._written_at is None or now - self._written_at >= _LOG_INTERVAL_S


class FollowedProgress:
    """The progress of another process, which appends one line per unit to a file.

    A context manager: leaving it shows the last line of the file.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        total: int,
        unit: str,
        fields: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ):
        """Count the lines that the file has already: an earlier process wrote them.

        Args:
            run_dir: the run directory.
            name: the file is `<run_dir>/<name>.jsonl`.
            total: units of work.
            unit: the name of a unit, such as "step".
            fields: selects what to show from the last line.
        """
        self._run_dir = run_dir
        self._name = name
        self._fields = fields
        self._done = len(read_events(run_dir, name))
        self._polled_at = 0.0
        self._progress = Progress(total, unit, before=self._done)

    def __enter__(self) -> FollowedProgress:
        self._progress.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._read()
        self._progress.__exit__()

    def poll(self) -> None:
        """Show new lines. The file is read at most once a second."""
        if time.monotonic() - self._polled_at >= _POLL_INTERVAL_S:
            self._polled_at = time.monotonic()
            self._read()

    def _read(self) -> None:
        lines = read_events(self._run_dir, self._name)
        if len(lines) > self._done:
            self._done = len(lines)
            self._progress.update(self._done, **self._fields(lines[-1]))


def progress_line(
    unit: str, done: int, total: int, elapsed_s: float, fields: Mapping[str, Any], before: int = 0
) -> str:
    """Return the text of a progress line, without the bar.

    Args:
        unit: the name of a unit.
        done: units that are complete now.
        total: units of all the work.
        elapsed_s: seconds in which `before` became `done`.
        fields: values to show, as `Progress.update` takes them.
        before: units that were complete at the start.
    """
    parts = [f"{unit} {done}/{total}"]
    for name, value in fields.items():
        if value is None:
            continue
        rate = name.removesuffix("_per_s")
        parts.append(f"{name} {short(value)}" if rate == name else f"{short(value)} {rate}/s")
    if done >= total:
        parts.append(f"took {duration(elapsed_s)}")
    elif done > before:
        parts.append(f"ETA {duration(elapsed_s / (done - before) * (total - done))}")
    return " · ".join(parts)


def _with_bar(done: int, total: int, line: str, columns: int) -> RenderableType:
    """Put a bar before the line where the terminal is wide enough for both."""
    text = Text(line, no_wrap=True, overflow="ellipsis")
    if columns < _BAR_WIDTH + 1 + len(line):
        return text
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=total, completed=done, width=_BAR_WIDTH), text)
    return row
