"""Turn the records of a training run into the content of its panel. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase
from areal_lite.tools.report.measures import source_names
from areal_lite.tools.report.panel import Notice, Row, Section, View, sparkline
from areal_lite.tools.report.text import duration, off_policy_label, pause, short

RECENT_STEPS = 10
"""The steps whose mean pace is shown."""
_UNKNOWN = "–"
_SPARKS = 10
# Data sources that have a row. The report draws them all.
_MOST_SOURCES = 4


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The records of a run so far.

    Args:
        config: its settings.
        steps: the newest lines of metrics.jsonl, at most RECENT_STEPS.
        rewards: the mean reward of each step.
        evaluation: the newest line of evals.jsonl.
        status: that of the controller, which may not run yet, or no longer.
        since_step_s: seconds since the newest step was read.
        notices: what to look at.
    """

    config: TrainConfig
    steps: Sequence[Mapping[str, Any]] = ()
    rewards: Sequence[float] = ()
    evaluation: Mapping[str, Any] | None = None
    status: ControllerStatus | None = None
    since_step_s: float = 0.0
    notices: Sequence[Notice] = ()

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

    def per_second(self, key: str) -> float | None:
        """Return `key` per second of the timed steps."""
        amount, seconds = self.total(key), self.total("time_s")
        return amount / seconds if amount is not None and seconds else None


def train_view(state: RunState) -> View:
    """Lay out what a run has published."""
    steps = state.config.trainer.steps
    times_s = [step["time_s"] for step in state.timed]
    sections = [_learning(state), _generation(state), _speed(state), _off_policy(state)]
    if state.config.debug == "train_only":  # without servers
        del sections[1]
    return View(
        title=f"training · {state.config.run_dir}",
        unit="step",
        done=state.done,
        total=steps,
        eta_s=eta(times_s, steps - state.done, state.since_step_s),
        line=step_line(state.newest) if state.steps else {},
        sections=sections,
        waits=_waits(state),
        notices=state.notices,
    )


def eta(times_s: Sequence[float], left: int, since_s: float) -> float | None:
    """Return the seconds until `left` more units are complete; None if the pace is unknown.

    Args:
        times_s: the seconds of recent units.
        left: units that are not complete.
        since_s: seconds since the last unit was complete.
    """
    if not times_s or not left:
        return None
    return max(sum(times_s) / len(times_s) * left - since_s, 0.0)


def step_line(step: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values of the progress line from a line of metrics.jsonl."""
    return {
        "reward": step["reward_mean"],
        "staleness": step["staleness_mean"],
        "tok_per_s": step["tokens"] / step["time_s"],
        "pause": None if step["pause_s"] is None else pause(step["pause_s"]),
    }


def _learning(state: RunState) -> Section:
    reward = f"{_show(state.newest, 'reward_mean')} {sparkline(state.rewards, _SPARKS)}"
    return Section(
        "learning",
        (
            Row("reward", reward),
            *(
                Row(f"  {name}", _show(state.newest, f"reward_mean/{name}"))
                for name in source_names([state.newest])[:_MOST_SOURCES]
            ),
            Row("greedy accuracy", _accuracy(state.evaluation, "greedy")),
            Row("sampled accuracy", _accuracy(state.evaluation, "sampled")),
        ),
    )


def _accuracy(evaluation: Mapping[str, Any] | None, key: str) -> str:
    if evaluation is None or evaluation.get(key) is None:
        return _UNKNOWN
    return f"{evaluation[key]:.1%}, step {evaluation['version']}"


def _generation(state: RunState) -> Section:
    status = state.status
    ready = f"{status.servers_ready} of {state.config.server.count}" if status else _UNKNOWN
    return Section(
        "generation",
        (
            Row("servers ready", ready),
            Row("in flight", _in_flight(status)),
            Row("pause of a push", _show(state.newest, "pause_s", pause)),
        ),
    )


def _in_flight(status: ControllerStatus | None) -> str:
    if status is None:
        return _UNKNOWN
    if not status.servers_ready:
        return f"{status.in_flight} wait for a server"
    return f"{status.in_flight} of {status.concurrency_limit}"


def _speed(state: RunState) -> Section:
    def rate(key: str) -> str:
        value = state.per_second(key)
        return _UNKNOWN if value is None else f"{short(value)}/s"

    return Section(
        "speed",
        (
            Row("tokens", rate("tokens")),
            Row("trajectories", rate("trajectories")),
            Row("a step", _step_time(state)),
        ),
    )


def _off_policy(state: RunState) -> Section:
    step = state.newest
    algo = state.config.algo
    staleness = f"mean {_show(step, 'staleness_mean')}, max {_show(step, 'staleness_max')}"
    weight = f"mean {_show(step, 'behavior_weight')}, max {_show(step, 'weight_max')}"
    return Section(
        f"{off_policy_label(algo)}, staleness up to {state.config.buffer.max_staleness}",
        (
            Row("staleness", staleness if step else _UNKNOWN),
            Row("clipped", _show(step, "clip_fraction", "{:.2%} of tokens".format)),
            Row("behavior weight", weight if "behavior_weight" in step else _UNKNOWN),
        ),
    )


def _step_time(state: RunState) -> str:
    """Return the mean time of a step, and the share of it that the trainer waits for a batch."""
    time_s, wait_s = state.total("time_s"), state.total("wait_s")
    if not time_s:
        return _UNKNOWN
    mean_s = time_s / len(state.timed)
    mean = f"{short(mean_s)} s" if mean_s < 100 else duration(mean_s)
    return mean if wait_s is None else f"{mean}, waits {wait_s / time_s:.0%}"


def _waits(state: RunState) -> list[Row]:
    """Say what each part of the run does or waits for."""
    rows = [Row("trainer", _trainer(state))]
    if state.config.debug != "train_only":
        rows.append(Row("servers", _servers(state)))
    if state.status and state.status.evaluating:
        versions = ", ".join(str(version) for version in state.status.evaluating)
        rows.append(Row("evaluation", f"of step {versions} in progress"))
    return rows


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
    """Say what the servers do or wait for."""
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
    if status.version + state.config.max_lead + 1 >= state.config.trainer.steps:
        reason = "no more are needed"
    else:
        reason = "new ones would be too stale"
    return f"finish {status.requests} requests; {reason}" if status.requests else f"idle; {reason}"


def _show(values: Mapping[str, Any], key: str, form: Callable[[Any], str] = short) -> str:
    return _UNKNOWN if values.get(key) is None else form(values[key])
