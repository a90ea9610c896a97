"""The panel that a terminal shows during work.

    ╭─ training · runs/first ───────────────────────────────────╮
    │ step 34 of 60  ━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━  57 %  ETA 0:54 │
    │                                                           │
    │ learning                     speed                        │
    │ reward      0.71 ▁▂▃▅▆▇█     tokens    5.6k/s             │
    │                                                           │
    │ trainer     trains on step 35                             │
    ╰───────────────────────────────────────────── 1:12 elapsed ╯

* A row is one line, which is cut where it is too long. Only a wait gets the lines that it needs.
* A narrow terminal has one column. A low one leaves out notices, then sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from textwrap import wrap
from typing import Any, NamedTuple

from rich.box import ROUNDED
from rich.console import Console, ConsoleOptions, RenderResult
from rich.console import Group as Lines
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_lite.tools.report.text import duration, visible

_MOST_COLUMNS = 100
# The ^C that a terminal writes for Ctrl-C stays on the last line of the panel.
_MARGIN = 2
_BORDER = 4
_LEAST_TWO_COLUMNS = 68
_LEAST_BAR = 8
_GAP = 2
# Columns of a name: in a section, and of a wait or a notice.
_LABEL = 17
_SHORT_LABEL = 12
_SPARKS = "▁▂▃▄▅▆▇█"
_STYLES = {"alarm": "bold red", "error": "bold red", "warning": "yellow", "hint": "yellow"}


class Row(NamedTuple):
    """A name and its value."""

    name: str
    value: str


class Section(NamedTuple):
    """Rows that belong together, under a title."""

    title: str
    rows: Sequence[Row]


class Notice(NamedTuple):
    """Something to look at. `level` is alarm, hint, error, warning, or a name of the text."""

    level: str
    text: str


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of running work, as a panel shows it.

    Args:
        title: what the work is.
        unit: the name of a unit of work, such as "step".
        done: units that are complete.
        total: units of all the work.
        eta_s: seconds until all are complete; None if unknown.
        line: values for a line in a log, by name (progress.py).
        sections: the numbers.
        waits: what each part of the run does or waits for.
        notices: what to look at, the most important first.
    """

    title: str
    unit: str
    done: int
    total: int
    eta_s: float | None = None
    line: Mapping[str, Any] = field(default_factory=dict)
    sections: Sequence[Section] = ()
    waits: Sequence[Row] = ()
    notices: Sequence[Notice] = ()


@dataclass(frozen=True)
class ViewPanel:
    """The panel of `view`, `elapsed_s` seconds after the start."""

    view: View
    elapsed_s: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = min(options.max_width - _MARGIN, _MOST_COLUMNS)
        inner = max(columns - _BORDER, 1)
        progress = list(_progress(self.view, inner))
        rows = _fitting(self.view, inner, options.size.height - len(progress) - 2)
        title = Text(_one_line(self.view.title), style="bold not dim")
        title.truncate(max(inner - 2, 1), overflow="ellipsis")
        yield Panel(
            Lines(*progress, *rows),
            box=ROUNDED,
            border_style="dim",
            title=title,
            title_align="left",
            subtitle=f"{duration(self.elapsed_s)} elapsed",
            subtitle_align="right",
            width=columns,
        )


def sparkline(values: Sequence[float], cells: int) -> str:
    """Draw the course of `values` in at most `cells` characters, each the mean of its share."""
    cells = min(cells, len(values))
    edges = [round(i * len(values) / cells) for i in range(cells + 1)] if cells else []
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:])]
    if not means or min(means) == max(means):
        return _SPARKS[0] * cells
    scale = (len(_SPARKS) - 1) / (max(means) - min(means))
    return "".join(_SPARKS[round((mean - min(means)) * scale)] for mean in means)


def _progress(view: View, columns: int) -> Iterator[Text | Table]:
    """Yield the line with the bar, or two lines where one is too short for it."""
    done = f"{view.unit} {view.done} of {view.total}"
    share = f"{view.done / max(view.total, 1):.0%}"
    left = "" if view.eta_s is None else f"  ETA {duration(view.eta_s)}"
    room = columns - len(done) - len(share) - len(left) - 2 * _GAP
    if room < _LEAST_BAR:
        yield _cut(Text(done + left, style="bold"), columns)
        done, left, room = "", "", columns - len(share) - _GAP
    row = Table.grid(padding=(0, _GAP, 0, 0))
    bar = ProgressBar(
        total=max(view.total, 1),
        completed=view.done,
        width=max(room, 1),
        complete_style="cyan",
        finished_style="green",
    )
    cells = [Text(done, style="bold")] if done else []
    row.add_row(*cells, bar, Text(share + left, no_wrap=True))
    yield row


def _fitting(view: View, columns: int, lines: int) -> list[Text]:
    """Return the rows below the bar, at most `lines`, with as much as there is room for."""
    waits = [row for wait in view.waits for row in _wrapped(wait, columns)]
    rows = _blocks(_sections(view.sections, columns), waits)
    if len(rows) > lines:
        return _blocks(waits)[: max(lines, 0)]
    notices = [_notice(notice, columns) for notice in view.notices]
    return rows + _blocks(notices[: max(lines - len(rows) - 1, 0)])


def _blocks(*blocks: list[Text]) -> list[Text]:
    """Return the rows of all blocks, an empty one before each."""
    return [row for block in blocks if block for row in (Text(), *block)]


def _sections(sections: Sequence[Section], columns: int) -> list[Text]:
    """Return the rows of the sections, two next to each other where there is room."""
    if columns < _LEAST_TWO_COLUMNS:
        # Without titles, as a narrow terminal is often low, too.
        return [_row(row, columns) for section in sections for row in section.rows]
    width = (columns - _GAP) // 2
    rows: list[Text] = []
    for left, right in zip_longest(sections[::2], sections[1::2]):
        halves = [_section(section, width) for section in (left, right) if section]
        rows += [Text()] if rows else []
        for pair in zip_longest(*halves, fillvalue=Text(" " * width)):
            rows.append(Text(" " * _GAP).join(pair))
    return rows


def _section(section: Section, columns: int) -> list[Text]:
    title = _cut(Text(section.title, style="bold"), columns)
    return [title, *(_row(row, columns) for row in section.rows)]


def _row(row: Row, columns: int) -> Text:
    name = _cut(Text(row.name, style="dim"), _LABEL)
    return _cut(Text.assemble(name, _one_line(row.value)), columns)


def _wrapped(row: Row, columns: int) -> list[Text]:
    """Return `row` on as many lines as it needs."""
    lines = wrap(_one_line(row.value), max(columns - _SHORT_LABEL, 1))
    names = [row.name, *[""] * (len(lines) - 1)]
    return [
        _cut(Text.assemble(_cut(Text(name, style="dim"), _SHORT_LABEL), line), columns)
        for name, line in zip(names, lines)
    ]


def _notice(notice: Notice, columns: int) -> Text:
    level = _cut(Text(notice.level, style=_STYLES.get(notice.level, "dim")), _SHORT_LABEL)
    return _cut(Text.assemble(level, _one_line(notice.text)), columns)


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def _cut(text: Text, columns: int) -> Text:
    """Make `text` exactly `columns` wide, on one line."""
    text.no_wrap = True
    text.truncate(columns, overflow="ellipsis", pad=True)
    return text
