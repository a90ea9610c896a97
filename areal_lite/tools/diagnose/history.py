"""The records of a run, the thresholds, and the kinds of findings."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_lite.config import TrainConfig, load_config
from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.paths import CONFIG_FILE, LOGS_DIR, STORE_FILE, SUMMARY_FILE
from areal_lite.run_dir.resume import is_locked, stop_requested
from areal_lite.system.processes import tail
from areal_lite.tools.report.run_data import Columns, read_columns

_LOG_LINES = 400
# A server's own log (server-N.log) can be gigabytes.
_LOGS = ("controller", "trainer", "servers.", "restarts.")
_ERROR = re.compile(r" ERROR |^\s*\w*(?:Error|Exception)\b")
_NO = np.empty(0)


class Severity(StrEnum):
    """ALARM: the run is broken or learns nothing. HINT: it could be faster or better."""

    ALARM = "alarm"
    HINT = "hint"


class Sign(NamedTuple):
    """The severity of a finding and its evidence, numbers included."""

    severity: Severity
    evidence: str
    words: Mapping[str, str] = {}  # title, cause and change, where they are closer than the kind's


alarm = partial(Sign, Severity.ALARM)
hint = partial(Sign, Severity.HINT)


@dataclass(frozen=True)
class Finding:
    """A kind of finding, or one about a run: then with its severity and evidence.

    Settings stand in backticks.
    """

    check: "Callable[[History], Sign | None]"
    title: str
    flag: str  # when it is found, with the thresholds in braces
    cause: str
    change: str
    unless: tuple[str, ...]  # the findings that explain it
    severity: Severity = Severity.HINT
    evidence: str = ""

    @property
    def name(self) -> str:
        return self.check.__name__


def finding(
    title: str, *, flag: str, cause: str, change: str, unless: tuple[str, ...] = ()
) -> "Callable[[Callable[[History], Sign | None]], Finding]":
    """Make a check of a history into a kind of finding. See Finding for the arguments."""
    return lambda check: Finding(check, title, flag, cause, change, unless)


# The thresholds, and why they are where they are.
LIMITS: dict[str, float] = {
    "recent_steps": 10,  # steps that count as recent: more than the noise of one batch
    "least_steps": 5,  # fewer steps say nothing about a trend
    "stall_factor": 10,  # usual step times (median) without a step: evaluations fit into it
    "stall_s": 60,  # seconds that are no stall yet: six status lines of the controller
    # nats: bfloat16 rounds to 0.01, float32 to 1e-6 (docs/training.md; arXiv 2506.13585)
    "logprob_diff": 0.05,
    "logprob_growth": 100,  # times the first steps, above 0.001 nats: rounding does not grow
    "uniform_share": 0.5,  # half of the batch adds nothing (DAPO, arXiv 2503.14476)
    "uniform_alarm": 0.9,  # most batches of 8 groups then have none to learn from
    "signal_groups": 30,  # of which none has a signal: below 10 % have one, 95 % confidence
    "repeated": 1.2,  # completions in a group: in few groups does a completion come twice
    "unlikely": 20,  # nats: a chance of 2e-9
    "entropy_ratio": 0.1,  # of the first entropy: reward is paid with it (arXiv 2505.22617)
    "solved_reward": 0.95,  # of the largest reward: low entropy is right for a solved task
    "reward_ratio": 0.5,  # of the best recent mean: half of what was learned is lost
    "accuracy_drop": 0.03,  # below the best evaluation, besides two standard errors
    "mixed_share": 0.5,  # of the steps between two evaluations, which then hardly differ
    "ess": 0.5,  # half of the tokens are wasted (Kong, 1992; arXiv 2509.19128, eq. 6)
    # nats a token: most runs above it lost much, none below (benchmarks/results/staleness)
    "behave_kl": 0.05,
    "rejected": 0.1,  # of the tokens left out: the batch is smaller than it looks
    "capped_steps": 0.5,  # of the recent steps have a weight at algo.correction.cap
    "truncated_share": 0.1,  # such trajectories are punished for length, not for content
    "truncated_alarm": 0.5,  # most rewards say nothing about the answer
    "grad_spike": 20,  # times the median: ten is common while rewards are rare
    "failures": 0.01,  # of the trajectories: above what flaky tools explain
    "failures_alarm": 0.1,  # of the trajectories: the data are biased towards what works
    "wait_share": 0.3,  # of the time: the trainer could take a third fewer devices
    "busy_share": 0.05,  # of the time: a trainer that waits less is always busy
    "in_flight_share": 0.25,  # of the limit: servers that run so few requests idle
    "full_share": 0.9,  # of the limit: more requests would be sent if they were allowed
    "overdue_share": 0.1,  # of the sampled tokens: a tenth of the work is thrown away
    "straggler_share": 0.1,  # of the time: the trainer has a whole batch and may not take it
    "pause_share": 0.1,  # of the time, in which no server generates (docs/servers.md)
    "loop_lag_s": 0.1,  # seconds: a decode step is shorter, so requests wait
    "adapter_share": 0.002,  # of the weights' size: bfloat16 rounds most of less away
    "reward_rise": 0.02,  # below the noise of the mean reward of most batches
    "routes_changed": 0.2,  # twice what other kernels alone make (arXiv 2510.11370)
    "teacher_kl": 0.02,  # nats a token: as close as a few updates move a policy
    "teacher_ratio": 0.95,  # of the distance at the start: within its noise
    "traces_share": 0.5,  # of the most traces: some episodes then reach the limit
    "source_share": 0.5,  # of what its weight says: draws follow weights exactly
    "value_explained": 0.0,  # a constant explains as much
    "restarts": 3,  # restarts: one is bad luck, three are a pattern
}


def limit(name: str) -> float:
    """Return the value of a threshold."""
    return LIMITS[name]


class Log(NamedTuple):
    """The last lines of a log, and the wall-clock seconds of its last change."""

    lines: list[str]
    changed_at: float


@dataclass(frozen=True, kw_only=True)
class History:
    """The records of one run. `now` is in wall-clock seconds, like every time in them."""

    run_dir: Path
    config: TrainConfig
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    columns: Columns
    logs: dict[str, Log] = field(default_factory=dict)
    started_at: float
    now: float
    # A running run holds its lock. One that ended has a summary. One that was killed has neither.
    running: bool = False
    stopped: bool = False

    @property
    def complete(self) -> bool:
        """Return whether all steps are trained."""
        return self.step >= self.config.trainer.steps

    @property
    def step(self) -> int:
        """Return the number of trained steps. `metrics` may have only the newest of them."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def takes_turns(self) -> bool:
        """Return whether generation waits for every push, as nothing may start for later steps."""
        replays = self.config.buffer.replay.capacity
        return not replays and self.config.max_lead < self.config.sync.every

    def values(self, key: str) -> np.ndarray:
        """Return `key` of each step, float64 [steps], NaN where it is unknown."""
        return np.array([m.get(key) for m in self.metrics], np.float64)  # None becomes NaN

    def recent(self, key: str) -> np.ndarray:
        """Return the known values of the recent steps; empty if too few are known."""
        return _known(self.values(key)[-int(limit("recent_steps")) :])

    def first(self, key: str) -> np.ndarray:
        """Return the known values of the first steps; empty unless the run is twice as long."""
        values, least = self.values(key), int(limit("least_steps"))
        return _known(values[:least]) if len(values) >= 2 * least else _NO

    def middle(self, key: str) -> np.ndarray:
        """Return the known values, but not of the first step or while generation ends."""
        last = 1 + self.config.buffer.max_staleness if self.complete else 0
        return _known(self.values(key)[1 : max(len(self.metrics) - last, 0)])

    def share_of_time(self, key: str) -> float | None:
        """Return the seconds of `key` as a share of the steps' time; None with too few steps."""
        seconds, time_s = self.middle(key), self.middle("time_s")
        return float(seconds.sum() / time_s.sum()) if len(seconds) and time_s.sum() else None

    def count(self, key: str) -> int:
        """Return a count that starts at 0 with each process of the controller, over `metrics`."""
        found = self.values(key)
        before = found[:1] if self.step > len(self.metrics) else np.zeros(1)
        known = np.nan_to_num(np.concatenate((before, found)))
        grown = np.diff(known)
        return int(np.where(grown < 0, known[1:], grown).sum())

    def log_lines(self, name: str, text: str) -> list[str]:
        """Return the last lines of a log that contain `text`."""
        return [line for line in self.logs[name].lines if text in line] if name in self.logs else []

    @cached_property
    def errors(self) -> dict[str, str]:
        """Return the last error line of each log of the controller and the trainer ranks."""
        found = {
            name: [line.strip() for line in log.lines if _ERROR.search(line)]
            for name, log in self.logs.items()
            # An earlier start of the run wrote an older log.
            if name.startswith(("controller", "trainer")) and log.changed_at >= self.started_at
        }
        return {name: lines[-1] for name, lines in found.items() if lines}


def _known(values: np.ndarray) -> np.ndarray:
    known = values[np.isfinite(values)]
    return known if len(known) >= limit("least_steps") else _NO


def read_history(run_dir: Path, now: float | None = None, newest: int | None = None) -> History:
    """Read the records of a run, which may have ended, been killed or still be going.

    `now` is in wall-clock seconds; None is the present. `newest` is how many of the newest training
    steps to read. Raises ValueError for a directory without a training run.
    """
    return History(
        run_dir=run_dir,
        config=load_config(run_dir),
        metrics=read_metrics(run_dir, newest),
        evals=read_events(run_dir, "evals"),
        columns=read_columns(run_dir / STORE_FILE),
        logs={
            path.name: Log(tail(path, _LOG_LINES).splitlines(), path.stat().st_mtime)
            for path in sorted((run_dir / LOGS_DIR).glob("*.log"))
            if path.name.startswith(_LOGS)
        },
        started_at=(run_dir / CONFIG_FILE).stat().st_mtime,
        now=time.time() if now is None else now,
        running=not (run_dir / SUMMARY_FILE).exists() and is_locked(run_dir),
        stopped=stop_requested(run_dir),
    )
