"""Speeds and lengths, measured in the run directory of a run that has ended or is running.

* A server: during a trajectory of n tokens, b were in flight on its server on average, and the server
  began m requests. So it took n (step_s + per_sequence_s * b) + request_s * m seconds. Least squares
  over all trajectories, without negative numbers. Prompts count as part of a request.
* The trainer: seconds per token of a step, a push's seconds before and in its pause, and what is
  left of a step. Means. The time in which a push waits for requests is left out: the simulation has
  its own.
* Lengths: those of the stored groups, and the mean prompt.

The first steps are left out: servers and trainer warm up.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from areal_lite.config import load_config
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.store import Store
from areal_lite.simulate.lengths import RecordedLengths
from areal_lite.simulate.run import Workload
from areal_lite.simulate.speed import ServerSpeed
from areal_lite.simulate.trainer import TrainerSpeed

# Steps that are left out.
_WARM_UP = 3
# Of the fit and the queue, each of which follows from the other.
_ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """The stored trajectories of a run, in the order of their groups.

    Args:
        groups: group ids. tokens: sampled tokens. prompts: prompt tokens.
        started, finished: wall-clock seconds.
    """

    groups: np.ndarray
    tokens: np.ndarray
    prompts: np.ndarray
    started: np.ndarray
    finished: np.ndarray

    def after(self, time: float) -> "Trajectories":
        """Return those that started after `time`."""
        chosen = self.started >= time
        return Trajectories(**{name: getattr(self, name)[chosen] for name in vars(self)})


def measured_workload(run_dir: Path, warm_up: int, steps: int) -> Workload:
    """Return the workload of the run in `run_dir`. Raises ValueError if it has too few steps."""
    config = load_config(run_dir)
    records = read_metrics(run_dir)[_WARM_UP:]
    if len(records) < 5:
        raise ValueError(
            f"simulate.measured_run={run_dir}: {len(records)} steps after the first {_WARM_UP}, at "
            "least 5 are needed"
        )
    rows = read_trajectories(run_dir)
    late = rows.after(records[0]["logged_at"])
    prompt_tokens = float(late.prompts.mean())
    return Workload(
        lengths=RecordedLengths(_by_group(late)),
        server=fit_server(late, rows, config.server.count),
        trainer=_trainer_speed(records, prompt_tokens, config.trainer.data_parallel),
        prompt_tokens=round(prompt_tokens),
        warm_up=warm_up,
        steps=steps,
    )


def read_trajectories(run_dir: Path) -> Trajectories:
    """Read the trajectories of a run's store."""
    store = Store(run_dir / STORE_FILE, read_only=True)
    try:
        columns = ("group_id", "n_tokens", "n_prompt", "started_at", "finished_at")
        rows = [[t[name] for name in columns] for t in store.trajectories()]
    finally:
        store.close()
    groups, tokens, prompts, started, finished = (np.array(column) for column in zip(*rows))
    return Trajectories(
        groups=groups.astype(int),
        tokens=tokens - prompts,
        prompts=prompts,
        started=started,
        finished=finished,
    )


def fit_server(rows: Trajectories, everything: Trajectories, servers: int) -> ServerSpeed:
    """Fit the speed of a server to trajectories; `everything` was in flight with them."""
    in_flight = _mean_in_flight(rows, everything) / servers
    request_s = 0.0
    for _ in range(_ROUNDS):
        begun = _begun(rows, everything, request_s / servers) / servers
        design = np.stack([rows.tokens, rows.tokens * in_flight, begun], axis=1)
        (step_s, per_sequence_s, request_s), _ = nnls(design, rows.finished - rows.started)
    if not step_s + per_sequence_s:  # lengths hardly varied
        step_s = (rows.finished - rows.started).sum() / rows.tokens.sum()
        request_s = 0.0
    return ServerSpeed(
        step_s=float(step_s), per_sequence_s=float(per_sequence_s), request_s=float(request_s)
    )


def _begun(rows: Trajectories, everything: Trajectories, request_s: float) -> np.ndarray:
    """Return how many requests began during each of `rows`, one after the other, [rows].

    Each takes `request_s`. They queue when many arrive at once.
    """
    places = np.arange(len(everything.started)) * request_s
    ends = np.maximum.accumulate(np.sort(everything.started) - places) + places + request_s
    until = np.searchsorted(ends, rows.finished, side="right")
    return until - np.searchsorted(ends, rows.started, side="left")


def _mean_in_flight(rows: Trajectories, everything: Trajectories) -> np.ndarray:
    """Return how many trajectories were in flight on average during each of `rows`."""
    times = np.concatenate([everything.started, everything.finished])
    change = np.concatenate([np.ones(len(times) // 2), -np.ones(len(times) // 2)])
    order = np.argsort(times, kind="stable")
    times, number = times[order], np.cumsum(change[order])
    area = np.concatenate([[0], np.cumsum(number[:-1] * np.diff(times))])

    def integral(at: np.ndarray) -> np.ndarray:
        before = np.searchsorted(times, at, side="right") - 1
        return area[before] + number[before] * (at - times[before])

    return (integral(rows.finished) - integral(rows.started)) / (rows.finished - rows.started)


def _trainer_speed(records: list[dict], prompt_tokens: float, ranks: int) -> TrainerSpeed:
    """Average the parts of a step. What is neither waiting nor a push nor training is fixed."""
    steps = len(records) - 1
    seconds = records[-1]["logged_at"] - records[0]["logged_at"]
    keys = ("wait_s", "train_s", "push_s", "pause_s", "drain_s", "tokens", "trajectories")
    wait_s, train_s, push_s, pause_s, drain_s, tokens, trajectories = (
        sum(record[key] or 0.0 for record in records[1:]) for key in keys
    )
    pushes = max(1, sum(record["pause_s"] is not None for record in records[1:]))
    return TrainerSpeed(
        fixed_s=max(0.0, seconds - wait_s - train_s - push_s) / steps,
        per_token_s=train_s * ranks / (tokens + prompt_tokens * trajectories),
        prepare_s=max(0.0, push_s - pause_s - drain_s) / pushes,
        pause_s=pause_s / pushes,
    )


def _by_group(rows: Trajectories) -> list[list[int]]:
    """Return the lengths of each group."""
    groups: dict[int, list[int]] = {}
    for group, tokens in zip(rows.groups.tolist(), rows.tokens.tolist()):
        groups.setdefault(group, []).append(tokens)
    return list(groups.values())
