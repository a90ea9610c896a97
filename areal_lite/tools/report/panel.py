"""The progress of running work: a panel on a terminal (docs/first-run.md shows it), lines in a log.

    step 12/60 · reward 0.71 · staleness 1.2 · 4.1k tok/s · ETA 2:10

* On a terminal the panel stays in place, and messages scroll by above it. A line takes its place at
  the end. A row of the panel is one line, cut where it is too long; only a wait gets the lines that
  it needs. A narrow terminal has one column. A low one leaves out the last lines.
* A log gets a new line at most every ten seconds, and always the last one. So does a terminal
  without cursor movement, one whose shell shows its prompt meanwhile (`&`), and CI.

A `View` is the content of a panel; `train_view` makes it from the records of a training run.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

from rich.box import ROUNDED
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.console import Group as Lines
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_lite.config import TrainConfig
from areal_lite.controller.evaluation import failed_answers
from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase
from areal_lite.system.processes import visible
from areal_lite.tools.formatting import duration, pause, short
from areal_lite.tools.report.run_data import source_names
from areal_lite.tools.report.summary import age_label, off_policy_label

RECENT_STEPS = 10
"""The steps whose mean pace is shown."""
_UNKNOWN = "–"
_REWARD_SPARKS = 10
# Data sources that have a row. The report draws them all.
_MOST_SOURCES = 4

_LOG_INTERVAL_S = 10.0
_POLL_INTERVAL_S = 1.0
_MOST_COLUMNS = 100
# The ^C that a terminal writes for Ctrl-C stays on the last line of the panel.
_MARGIN = 2
_BORDER = 4
_LEAST_TWO_COLUMNS = 68
_GAP = 2
# Columns of a name: in a section, and of a wait or a notice.
_LABEL = 17
_SHORT_LABEL = 12
_SPARKS = "▁▂▃▄▅▆▇█"
_STYLES = {"alarm": "bold red", "error": "bold red", "warning": "yellow", "hint": "yellow"}


class Notice(NamedTuple):
    """Something to look at. `level` is alarm, hint, error, warning, or a name of the text."""

    level: str
    text: str


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of running work, as a panel shows it."""

    title: str  # what the work is
    unit: str  # the name of a unit of work, such as "step"
    done: int  # units that are complete
    total: int  # units of all the work
    eta_s: float | None = None  # seconds until all are complete; None if unknown
    line: Sequence[str] = ()  # what a line in a log says besides
    sections: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by title and name
    waits: Mapping[str, str] = field(default_factory=dict)  # what each part does or waits for
    notices: Sequence[Notice] = ()  # what to look at, the most important first


@dataclass(frozen=True)
class ViewPanel:
    """The panel of `view`, `elapsed_s` seconds after the start."""

    view: View
    elapsed_s: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = min(options.max_width - _MARGIN, _MOST_COLUMNS)
        inner = max(columns - _BORDER, 1)
        content = Lines(*_content(self.view, inner))
        lines = console.render_lines(content, options.update(width=inner, height=None))
        title = Text(_one_line(self.view.title), style="bold not dim")
        title.truncate(max(inner - 2, 1), overflow="ellipsis")
        yield Panel(
            content,
            box=ROUNDED,
            border_style="dim",
            title=title,
            title_align="left",
            subtitle=f"{duration(self.elapsed_s)} elapsed",
            subtitle_align="right",
            width=columns,
            # The end of a panel as high as the terminal would scroll its first line away.
            height=min(len(lines) + 2, max(options.size.height - 1, 4)),
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


def _content(view: View, columns: int) -> Iterator[Table | Columns | Text]:
    """Yield the parts of a panel. The last ones are cut off where the terminal is too low."""
    left = "" if view.eta_s is None else f"  ETA {duration(view.eta_s)}"
    share = f"{view.done / max(view.total, 1):.0%}"
    head = Table.grid(expand=True)
    head.add_column(no_wrap=True, overflow="ellipsis")
    head.add_row(Text(f"{view.unit} {view.done} of {view.total}  {share}{left}", style="bold"))
    bar: dict[str, Any] = {"complete_style": "cyan", "finished_style": "green"}
    head.add_row(ProgressBar(total=max(view.total, 1), completed=view.done, **bar))
    yield head
    width = columns if columns < _LEAST_TWO_COLUMNS else (columns - _GAP) // 2
    sections = [_rows(rows.items(), _LABEL, title, width) for title, rows in view.sections.items()]
    if view.waits:
        yield from (Text(), _rows(view.waits.items(), _SHORT_LABEL, wraps=True))
    if sections:
        yield from (Text(), Columns(sections, padding=(1, _GAP)))
    if view.notices:
        yield from (Text(), _rows(view.notices, _SHORT_LABEL))


def _rows(
    rows: Iterable[tuple[str, str]],
    label: int,
    title: str | None = None,
    width: int | None = None,
    wraps: bool = False,
) -> Table:
    """Lay out names, in `label` columns, and their values. Only a value that `wraps` is not cut."""
    table = Table.grid(expand=True)
    table.width, table.title_justify = width, "left"
    table.title = None if title is None else Text(title, style="bold")
    table.add_column(width=label, no_wrap=True, overflow="ellipsis")
    table.add_column(ratio=1, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    for name, value in rows:
        table.add_row(Text(name, style=_STYLES.get(name, "dim")), Text(_one_line(value)))
    return table


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))


class Progress:
    """Shows the progress of a piece of work. A context manager: leaving it ends the panel."""

    def __init__(
        self,
        view: Callable[[], View],
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare to show `view()`, the present state of the work, at most once a second.

        `stream` is the terminal or log file to write to; stderr by default.
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

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        view = self._view()
        self._written = view.done  # an earlier process has reported these
        self._show(view)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        self._write(self._view())

    def poll(self) -> None:
        """Show the present state, unless that was done within the last second."""
        if self._clock() - self._polled_at >= _POLL_INTERVAL_S:
            self._show(self._view())

    def _show(self, view: View) -> None:
        self._polled_at = now = self._clock()
        if self._live:
            width = self._live.console.width
            if width < self._width:
                # The terminal has wrapped the old panel, so that its height is unknown.
                self._live.console.control(Control.clear(), Control.home())
            self._width = width
            self._live.update(ViewPanel(view, now - self._started_at), refresh=True)
        elif self._written_at is None or now - self._written_at >= _LOG_INTERVAL_S:
            self._write(view)

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
    """Return the text of a progress line, `elapsed_s` seconds after the start."""
    parts = [f"{view.unit} {view.done}/{view.total}", *view.line]
    if view.done >= view.total:
        parts.append(f"took {duration(elapsed_s)}")
    elif view.eta_s is not None:
        parts.append(f"ETA {duration(view.eta_s)}")
    return " · ".join(parts)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The records of a run so far."""

    config: TrainConfig
    steps: Sequence[Mapping[str, Any]] = ()  # the newest of metrics.jsonl, at most RECENT_STEPS
    rewards: Sequence[float] = ()  # the mean reward of each step
    evaluation: Mapping[str, Any] | None = None  # the newest line of evals.jsonl
    status: ControllerStatus | None = None  # None while there is no controller
    since_step_s: float = 0.0  # seconds since the newest step was read
    notices: Sequence[Notice] = ()  # what to look at

    @property
    def done(self) -> int:
        """Return the number of completed steps."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def newest(self) -> Mapping[str, Any]:
        """Return the newest step, or nothing."""
        return self.steps[-1] if self.steps else {}

    @property
    def timed(self) -> Sequence[Mapping[str, Any]]:
        """Return the recent steps but the first one, which includes the start of the servers."""
        return [step for step in self.steps if step["step"] > 1]

    def total(self, key: str) -> float | None:
        """Return the sum of `key` over the timed steps; None if one of them lacks it."""
        values = [value for step in self.timed if (value := step.get(key)) is not None]
        return float(sum(values)) if values and len(values) == len(self.timed) else None


def train_view(state: RunState) -> View:
    """Lay out what a run has published."""
    steps = state.config.trainer.steps
    config, without_servers = state.config, state.config.debug_mode == "train_only"
    off_policy = f"{off_policy_label(config.algo)}, {age_label(config.buffer)}"
    waits = {"trainer": _trainer(state)} | ({} if without_servers else {"servers": _servers(state)})
    if state.status and state.status.evaluating:
        versions = ", ".join(map(str, state.status.evaluating))
        waits["evaluation"] = f"of step {versions}: {state.status.evaluated} answers"
    if state.status and state.status.longest_wait:
        waits["longest"] = state.status.longest_wait
    return View(
        title=f"training · {state.config.run_dir}",
        unit="step",
        done=state.done,
        total=steps,
        eta_s=eta([step["time_s"] for step in state.timed], steps - state.done, state.since_step_s),
        line=step_line(state.newest) if state.steps else (),
        sections={
            "learning": _learning(state),
            **({} if without_servers else {"generation": _generation(state)}),
            "speed": _speed(state),
            off_policy: _off_policy(state),
        },
        waits=waits,
        notices=state.notices,
    )


def eta(times_s: Sequence[float], left: int, since_s: float) -> float | None:
    """Return the seconds until `left` more units are complete; None if the pace is unknown.

    Recent units took `times_s` seconds, and the last one is complete since `since_s` seconds.
    """
    if not times_s or not left:
        return None
    return max(sum(times_s) / len(times_s) * left - since_s, 0.0)


def step_line(step: Mapping[str, Any]) -> list[str]:
    """Return what a progress line says of a line of metrics.jsonl."""
    means = {"reward": step["reward_mean"], "staleness": step["staleness_mean"]}
    line = [f"{name} {short(value)}" for name, value in means.items() if value is not None]
    line.append(f"{short(step['tokens'] / step['time_s'])} tok/s")
    return line if step["pause_s"] is None else [*line, f"pause {pause(step['pause_s'])}"]


def _learning(state: RunState) -> dict[str, str]:
    sources = source_names([state.newest])[:_MOST_SOURCES]
    sparks = sparkline(state.rewards, _REWARD_SPARKS)
    return {
        "reward": f"{_show(state.newest, 'reward_mean')} {sparks}",
        **{f"  {name}": _show(state.newest, f"reward_mean/{name}") for name in sources},
        "greedy accuracy": _accuracy(state.evaluation, "greedy"),
        "sampled accuracy": _accuracy(state.evaluation, "sampled"),
        **({"evaluation": failures} if (failures := failed_answers(state.evaluation)) else {}),
    }


def _accuracy(evaluation: Mapping[str, Any] | None, key: str) -> str:
    if evaluation is None or evaluation.get(key) is None:
        return _UNKNOWN
    return f"{evaluation[key]:.1%}, step {evaluation['version']}"


def _generation(state: RunState) -> dict[str, str]:
    status = state.status
    ready = in_flight = _UNKNOWN
    if status:
        ready = f"{status.servers_ready} of {state.config.server.count}"
        most = f"of {status.concurrency_limit}" if status.servers_ready else "wait for a server"
        in_flight = f"{status.in_flight} {most}"
    return {
        "servers ready": ready,
        "in flight": in_flight,
        "pause of a push": _show(state.newest, "pause_s", pause),
    }


def _speed(state: RunState) -> dict[str, str]:
    def rate(key: str) -> str:
        amount, seconds = state.total(key), state.total("time_s")
        return _UNKNOWN if amount is None or not seconds else f"{short(amount / seconds)}/s"

    return {
        "tokens": rate("tokens"),
        "trajectories": rate("trajectories"),
        "a step": _step_time(state),
        **({"judge": _judge(state.newest)} if "judge_calls" in state.newest else {}),
    }


def _judge(step: Mapping[str, Any]) -> str:
    calls, cached = f"{short(step['judge_calls'])} calls", f"{short(step['judge_cached'])} known"
    times_s = f"{_show(step, 'judge_p50_s')} to {_show(step, 'judge_p99_s')} s"
    return f"{calls}, {cached}, {times_s}, {short(step['judge_tokens'])} tokens"


def _off_policy(state: RunState) -> dict[str, str]:
    step = state.newest
    staleness = f"mean {_show(step, 'staleness_mean')}, max {_show(step, 'staleness_max')}"
    weight = f"mean {_show(step, 'behavior_weight')}, max {_show(step, 'weight_max')}"
    return {
        "staleness": staleness if step else _UNKNOWN,
        "clipped": _show(step, "clip_fraction", "{:.2%} of tokens".format),
        "behavior weight": weight if "behavior_weight" in step else _UNKNOWN,
    }


def _step_time(state: RunState) -> str:
    """Return the mean time of a step, and the share of it that the trainer waits for a batch."""
    time_s, wait_s = state.total("time_s"), state.total("wait_s")
    if not time_s:
        return _UNKNOWN
    mean_s = time_s / len(state.timed)
    mean = f"{short(mean_s)} s" if mean_s < 100 else duration(mean_s)
    return mean if wait_s is None else f"{mean}, waits {wait_s / time_s:.0%}"


def _trainer(state: RunState) -> str:
    status = state.status
    if state.done >= state.config.trainer.steps:
        return "all steps done, saves the model"
    if status is None:
        return f"trains on step {state.done + 1}" if state.done else "loads the model"
    step = max(status.step, state.done) + 1  # the status may be older than the metrics
    match status.trainer:
        case TrainerPhase.LOADING:
            return "loads the model"
        case TrainerPhase.PUSHING:
            return "pushes its weights to the servers"
        case TrainerPhase.WAITING:
            if status.held_by is not None:
                return f"waits for group {status.held_by}, which no more groups may pass"
            needs = f"{status.missing_groups} of {state.config.trainer.batch_groups} groups"
            return f"waits for {needs} of step {step}"
        case TrainerPhase.TRAINING:
            return f"trains on step {step}"


def _servers(state: RunState) -> str:
    status = state.status
    if status is None or not status.servers_announced:
        return "stop" if state.done >= state.config.trainer.steps else "start"
    if not status.servers_ready:
        return f"wait for the weights of step {status.step}"
    if status.trainer is TrainerPhase.PUSHING:
        return "take new weights"
    if status.can_admit:
        if not status.requests:
            return "have no requests: rewards or tools are at work"
        # Requests of an evaluation come on top of those for training.
        more = ", evaluation included" if status.evaluating else ""
        return f"generate: {status.requests} requests{more}"
    suffice = status.version + state.config.max_lead + 1 >= state.config.trainer.steps
    reason = "no more are needed" if suffice else "new ones would only get stale"
    return f"finish {status.requests} requests; {reason}" if status.requests else f"idle; {reason}"


def _show(values: Mapping[str, Any], key: str, form: Callable[[Any], str] = short) -> str:
    return _UNKNOWN if values.get(key) is None else form(values[key])
