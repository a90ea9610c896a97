"""The progress of running work: a panel on a terminal, lines in a log.

    step 12/60 · reward 0.71 · staleness 1.2 · 4.1k tok/s · ETA 2:10

* On a terminal the panel (panel.py) stays in place, and messages scroll by above it. A line takes
  its place at the end.
* A log gets a new line at most every ten seconds, and always the last one. So does a terminal
  without cursor movement, one whose shell shows its prompt meanwhile (`&`), and CI.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from rich.console import Console
from rich.control import Control
from rich.live import Live

from areal_lite.tools.report.panel import View, ViewPanel
from areal_lite.tools.report.text import duration, short

_LOG_INTERVAL_S = 10.0
_POLL_INTERVAL_S = 1.0


class Progress:
    """Shows the progress of a piece of work. A context manager: leaving it ends the panel."""

    def __init__(
        self,
        view: Callable[[], View],
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare to show `view()`, the present state of the work.

        Args:
            view: is called at most once a second.
            stream: the terminal or log file to write to; stderr by default.
            clock: returns seconds.
        """
        self._view = view
        self._stream = stream or sys.stderr
        self._clock = clock
        self._started_at = self._polled_at = clock()
        self._written_at: float | None = None
        self._written = 0  # units
        self._width = 0
        console = Console(file=self._stream)
        self._live: Live | None = None
        if takes_panel(console):
            self._live = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                # A stdout that is a pipe gets what is printed to it.
                redirect_stdout=sys.stdout.isatty(),
                vertical_overflow="crop",
            )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        view = self._view()
        self._written = view.done  # an earlier process has reported these
        self._show(view)
        return self

    def __exit__(self, *_: object) -> None:
        view = self._view()
        if self._live:
            self._live.stop()
        self._write(view)

    def poll(self) -> None:
        """Show the present state, unless that was done within the last second."""
        if self._clock() - self._polled_at >= _POLL_INTERVAL_S:
            self._show(self._view())

    def _show(self, view: View) -> None:
        self._polled_at = now = self._clock()
        if self._live:
            self._redraw(self._live, ViewPanel(view, now - self._started_at))
        elif self._written_at is None or now - self._written_at >= _LOG_INTERVAL_S:
            self._write(view)

    def _redraw(self, live: Live, panel: ViewPanel) -> None:
        width = live.console.width
        if width < self._width:
            # The terminal has wrapped the old panel, so that its height is unknown.
            live.console.control(Control.clear(), Control.home())
        self._width = width
        live.update(panel, refresh=True)

    def _write(self, view: View) -> None:
        """Write the line of `view`, if more is done than the last line says."""
        if view.done != self._written:
            self._written, self._written_at = view.done, self._clock()
            print(progress_line(view, self._clock() - self._started_at), file=self._stream)
            self._stream.flush()


def takes_panel(console: Console) -> bool:
    """Return whether `console` writes to a terminal whose screen this process may draw on."""
    stream = console.file
    if not stream.isatty() or console.is_dumb_terminal or os.environ.get("CI"):
        return False
    with suppress(OSError):  # not the terminal that controls this process, or no file at all
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    return True


def progress_line(view: View, elapsed_s: float) -> str:
    """Return the text of a progress line, `elapsed_s` seconds after the start.

    A value reads `name value`, except `tok_per_s`, which reads `4.1k tok/s`. None is left out.
    """
    parts = [f"{view.unit} {view.done}/{view.total}"]
    for name, value in view.line.items():
        if value is None:
            continue
        rate = name.removesuffix("_per_s")
        parts.append(f"{name} {short(value)}" if rate == name else f"{short(value)} {rate}/s")
    if view.done >= view.total:
        parts.append(f"took {duration(elapsed_s)}")
    elif view.eta_s is not None:
        parts.append(f"ETA {duration(view.eta_s)}")
    return " · ".join(parts)
