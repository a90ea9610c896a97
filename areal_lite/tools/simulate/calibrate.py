"""Speeds and lengths, measured in the run directory of a run that has ended or is running.

* A server: while b requests are in flight on it, a decoding step takes step_s + per_sequence_s * b.
  Each request that begins holds all up for request_s. A trajectory that spent t_b seconds with b in
  flight, in which m_b requests began, has as many tokens as the sum over b of
  (t_b - request_s * m_b) / (step_s + per_sequence_s * b). Least squares over all trajectories.
* The trainer: seconds per token of a step, a push's seconds before and in its pause, and what is
  left of a step. Means. The time in which a push waits for requests is left out: the simulation has
  its own.
* Lengths: the stored groups, and the mean prompt.

The first steps are left out: servers and trainer warm up.
"""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from areal_lite.config import load_config
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.reader import RunReader
from areal_lite.tools.simulate.decoding import ServerSpeed
from areal_lite.tools.simulate.workload import RecordedLengths, TrainerSpeed, Workload

# Steps that are left out.
_WARM_UP = 3
# The fit and the queue follow from each other: repeat both this often.
_ROUNDS = 4
# Levels of the number in flight that a fit tells apart.
_LEVELS = 32
# step_s, per_sequence_s and request_s: where a fit begins, the least and the most.
_FIRST_GUESS = np.array([3e-3, 3e-5, 1e-3])
_BOUNDS = ([1e-5, 0.0, 0.0], [10.0, 1.0, 10.0])


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
    late = rows[rows["started"] >= records[0]["logged_at"]]
    prompt_tokens = float(late["prompt"].mean())
    return Workload(
        lengths=RecordedLengths(_by_group(late)),
        server=fit_server(late, rows),
        trainer=_trainer_speed(records, prompt_tokens, config.trainer.data_parallel),
        prompt_tokens=round(prompt_tokens),
        warm_up=warm_up,
        steps=steps,
    )


def read_trajectories(run_dir: Path) -> np.ndarray:
    """Read group, server, prompt tokens, sampled tokens, start and end of each trajectory."""
    names = ("group", "server", "prompt", "tokens", "started", "finished")
    with closing(RunReader(run_dir / STORE_FILE)) as reader:
        chunks = list(reader.chunks(names))
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in names}
    columns["tokens"] -= columns["prompt"]
    return table(columns)


def table(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the columns as one array of rows, [n]."""
    rows = np.empty(
        len(next(iter(columns.values()))), [(name, one.dtype) for name, one in columns.items()]
    )
    for name, column in columns.items():
        rows[name] = column
    return rows


def fit_server(rows: np.ndarray, everything: np.ndarray) -> ServerSpeed:
    """Fit the speed of the servers to trajectories; `everything` was in flight with them.

    The speeds are in seconds.
    """
    servers = [
        _Server(rows[rows["server"] == name], everything[everything["server"] == name])
        for name in np.unique(rows["server"])
    ]

    def surplus(speed: np.ndarray, begun: list[np.ndarray]) -> np.ndarray:
        pairs = zip(servers, begun, strict=True)
        return np.concatenate([server.surplus(speed, counts) for server, counts in pairs])

    speed = _FIRST_GUESS
    for _ in range(_ROUNDS):
        begun = [server.begun(speed[2]) for server in servers]
        found = least_squares(surplus, speed, bounds=_BOUNDS, x_scale=_FIRST_GUESS, args=(begun,))
        speed = found.x
    step_s, per_sequence_s, request_s = speed.tolist()
    return ServerSpeed(step_s=step_s, per_sequence_s=per_sequence_s, request_s=request_s)


class _Server:
    """The trajectories of one server, and what they say about its speed.

    The number in flight over time is on levels that grow by a factor. `rows` are fitted, and
    `everything` was in flight with them.
    """

    def __init__(self, rows: np.ndarray, everything: np.ndarray):
        self._rows = rows
        self._started = np.sort(everything["started"])
        times = np.concatenate([everything["started"], everything["finished"]])
        change = np.repeat([1, -1], len(times) // 2)
        order = np.argsort(times, kind="stable")
        number = np.cumsum(change[order])[:-1]
        edges = np.geomspace(1, number.max() + 1, _LEVELS + 1)
        self._times = times[order]
        self._level = np.clip(np.searchsorted(edges, number, side="right") - 1, 0, _LEVELS - 1)
        seconds = np.diff(self._times) * (number > 0)
        # Seconds on each level until each time.
        until = np.zeros((len(times), _LEVELS))
        until[np.arange(len(seconds)) + 1, self._level] = seconds
        until = np.cumsum(until, axis=0)
        on_level = np.bincount(self._level, seconds * number, _LEVELS)
        self._in_flight = on_level / np.maximum(until[-1], 1e-9)
        starts, ends = (
            np.searchsorted(self._times, some, side="right") - 1
            for some in (rows["started"], rows["finished"])
        )
        self._spent = until[ends] - until[starts]

    def begun(self, request_s: float) -> np.ndarray:
        """Return how many requests began during each trajectory, by level, [rows, levels].

        They begin one after the other. Each takes `request_s`, so they queue when many arrive.
        """
        places = np.arange(len(self._started)) * request_s
        begins = np.maximum.accumulate(self._started - places) + places + request_s
        interval = np.searchsorted(self._times, begins, side="right") - 1
        level = self._level[np.minimum(interval, len(self._level) - 1)]
        until = np.zeros((len(begins) + 1, _LEVELS))
        until[np.arange(len(begins)) + 1, level] = 1
        until = np.cumsum(until, axis=0)
        ends = np.searchsorted(begins, self._rows["finished"], side="right")
        return until[ends] - until[np.searchsorted(begins, self._rows["started"], side="left")]

    def surplus(self, speed: np.ndarray, begun: np.ndarray) -> np.ndarray:
        """Return how many tokens more than its own each trajectory would have, [rows]."""
        step_s, per_sequence_s, request_s = speed
        step = step_s + per_sequence_s * self._in_flight
        return ((self._spent - request_s * begun) / step).sum(axis=1) - self._rows["tokens"]


def _trainer_speed(records: list[dict], prompt_tokens: float, ranks: int) -> TrainerSpeed:
    """Average the parts of a step. What is neither waiting nor a push nor training is fixed."""
    steps = len(records) - 1
    seconds = records[-1]["logged_at"] - records[0]["logged_at"]
    keys = ("wait_s", "train_s", "push_s", "pause_s", "drain_s", "tokens", "trajectories")
    wait_s, train_s, push_s, pause_s, drain_s, tokens, trajectories = (
        sum(record.get(key) or 0.0 for record in records[1:]) for key in keys
    )
    pushes = max(1, sum(record["pause_s"] is not None for record in records[1:]))
    return TrainerSpeed(
        fixed_s=max(0.0, seconds - wait_s - train_s - push_s) / steps,
        per_token_s=train_s * ranks / (tokens + prompt_tokens * trajectories),
        prepare_s=max(0.0, push_s - pause_s - drain_s) / pushes,
        pause_s=pause_s / pushes,
    )


def _by_group(rows: np.ndarray) -> list[list[int]]:
    """Return the lengths of each group."""
    groups: dict[int, list[int]] = {}
    for group, tokens in zip(rows["group"].tolist(), rows["tokens"].tolist()):
        groups.setdefault(group, []).append(tokens)
    return list(groups.values())
