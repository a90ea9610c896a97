"""A progress line with an ETA for work that takes longer than a moment.

    step 12/60 · reward 0.71 · staleness 1.2 · 4.1k tok/s · ETA 2:10

On a terminal the line is rewritten in place; in a log file there is a new one every ten seconds at most, and always the last.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from areal_lite.run_dir.metrics import read_events

_TERMINAL_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 10.0


class Progress:
    """Progress of `total` units of `what` ("step", "problem", …), on stderr. The ETA assumes the mean pace since the construction, when
    `before` of them were complete."""

    def __init__(
        self,
        total: int,
        what: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        before: int = 0,
    ):
        self._before = before
        self.total, self.what, self.stream, self.clock = total, what, stream or sys.stderr, clock
        self._terminal = self.stream.isatty()
        self._started_at = clock()
        self._written_at: float | None = None
        self._line_open = False

    def update(self, done: int, **fields: Any) -> None:
        """`done` units are complete. Fields are shown as `name value`; one named `tok_per_s` as `4.1k tok/s`. None is left out."""
        now = self.clock()
        interval = _TERMINAL_INTERVAL_S if self._terminal else _LOG_INTERVAL_S
        if done < self.total and self._written_at is not None and now - self._written_at < interval:
            return
        self._written_at = now
        line = progress_line(
            self.what, done, self.total, now - self._started_at, fields, self._before
        )
        if self._terminal:
            # A line wider than the terminal would wrap and could not be rewritten.
            line = f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K"
            self._line_open = True
        else:
            line += "\n"
        self.stream.write(line)
        self.stream.flush()

    def close(self) -> None:
        """End the line, so that what is written next starts on its own."""
        if self._line_open:
            self.stream.write("\n")
            self.stream.flush()
            self._line_open = False


class FollowedProgress:
    """Progress of another process, read from the lines that it appends to `<run_dir>/<name>.jsonl`: one line a unit of work."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        total: int,
        what: str,
        fields: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ):
        """`fields` picks from the last line what to show."""
        self._run_dir, self._name, self._fields = run_dir, name, fields
        self._done, self._looked_at = len(read_events(run_dir, name)), 0.0
        self._progress = Progress(total, what, before=self._done)

    def show(self) -> None:
        """Look for new lines, at most once a second."""
        if time.monotonic() - self._looked_at < 1.0:
            return
        self._looked_at = time.monotonic()
        lines = read_events(self._run_dir, self._name)
        if len(lines) > self._done:
            self._done = len(lines)
            self._progress.update(self._done, **self._fields(lines[-1]))

    def close(self) -> None:
        """Show what came last, and end the line."""
        self._looked_at = 0.0
        self.show()
        self._progress.close()


def progress_line(
    what: str, done: int, total: int, elapsed_s: float, fields: Mapping[str, Any], before: int = 0
) -> str:
    """The text of a progress line after `elapsed_s` seconds, in which `before` became `done`."""
    parts = [f"{what} {done}/{total}"]
    for name, value in fields.items():
        if value is None:
            continue
        unit = name.removesuffix("_per_s")
        parts.append(f"{name} {short(value)}" if unit == name else f"{short(value)} {unit}/s")
    if done >= total:
        parts.append(f"took {duration(elapsed_s)}")
    elif done > before:
        parts.append(f"ETA {duration(elapsed_s / (done - before) * (total - done))}")
    return " · ".join(parts)


def short(value: Any) -> str:
    """A number as a person wants it at a glance: 0.71, 1.2, 340, 4.1k, 3.9M. Anything else as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + suffix
    if abs(value) >= 100:
        return f"{value:.0f}"
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.1g}"


def duration(seconds: float) -> str:
    """2:10, 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
