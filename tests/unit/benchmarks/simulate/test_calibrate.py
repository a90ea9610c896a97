"""Calibration: a run directory that a known model made gives that model back."""

import math
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from areal_lite.tools.report.run_data import Columns
from benchmarks.simulate.decoding import DecodingServer, Generation, ServerSpeed
from benchmarks.simulate.workload import _trainer_speed, fit_server

RNG = np.random.default_rng(0)


Rows = dict[str, np.ndarray]
"""The columns of trajectories, and which of them are fitted."""


def fit(rows: Rows) -> ServerSpeed:
    return fit_server(cast(Columns, SimpleNamespace(**rows)), rows["fitted"])


def made_up(step_s: float, per_sequence_s: float, count: int = 400) -> Rows:
    """Trajectories of a server whose steps take longer, the more are in flight."""
    started = np.sort(RNG.uniform(0, 100, count))
    tokens = RNG.integers(20, 400, count)
    finished = started + 1.0
    for _ in range(60):  # the fixed point of durations and numbers in flight
        in_flight = np.array(
            [
                np.clip(np.minimum(finished, f) - np.maximum(started, s), 0, None).sum() / (f - s)
                for s, f in zip(started, finished)
            ]
        )
        finished = started + tokens * (step_s + per_sequence_s * in_flight)
    return rows_of(tokens, started, finished)


def rows_of(tokens: np.ndarray, started: np.ndarray, finished: np.ndarray) -> Rows:
    """Return trajectories of one server, all of which are fitted."""
    rows = {"sampled": tokens, "started": started, "finished": finished}
    return rows | {"server": np.zeros(len(tokens), int), "fitted": np.ones(len(tokens), bool)}


def test_the_time_of_a_step_is_found() -> None:
    speed = fit(made_up(0.01, 0.0004))
    assert speed.step_s == pytest.approx(0.01, rel=0.02)
    assert speed.per_sequence_s == pytest.approx(0.0004, rel=0.02)


def test_each_server_has_a_load_of_its_own() -> None:
    few, many = made_up(0.01, 0.0004, count=100), made_up(0.01, 0.0004)
    many["server"] += 1
    speed = fit({key: np.concatenate([few[key], many[key]]) for key in few})
    assert speed.step_s == pytest.approx(0.01, rel=0.02)
    assert speed.per_sequence_s == pytest.approx(0.0004, rel=0.02)


def modelled(speed: ServerSpeed, bursts: int, size: int) -> Rows:
    """Trajectories of the simulator's server. `size` requests arrive at once in each burst."""
    server, now = DecodingServer(speed), 0.0
    rows: dict[Generation, tuple[int, float, float]] = {}

    def pass_time(until: float) -> None:
        nonlocal now
        while (event := server.next_event()) is not None and event <= until:
            now = event
            for request in server.advance(now):
                rows[request] = (rows[request][0], rows[request][1], now)
        now = until
        server.advance(now)

    for _ in range(bursts):
        for _ in range(size):
            request = Generation(context=0, target=int(RNG.integers(10, 200)), prefill=0)
            rows[request] = (request.target, now, math.inf)
            server.add(request)
        pass_time(now + RNG.uniform(0.3, 1.5))
    pass_time(now + 1000)
    tokens, started, finished = (np.array(column) for column in zip(*rows.values()))
    assert np.isfinite(finished).all()
    return rows_of(tokens, started, finished)


@pytest.mark.parametrize("size", [1, 30])
def test_the_work_of_the_host_for_a_request_is_found(size: int) -> None:
    speed = ServerSpeed(step_s=0.003, per_sequence_s=5e-5, request_s=0.002)
    found = fit(modelled(speed, bursts=1500 // size, size=size))
    assert found.step_s == pytest.approx(speed.step_s, rel=1e-3)
    assert found.per_sequence_s == pytest.approx(speed.per_sequence_s, rel=1e-3)
    assert found.request_s == pytest.approx(speed.request_s, rel=1e-3)


def test_equal_lengths_give_a_speed() -> None:
    started = np.arange(50) * 1.0
    speed = fit(rows_of(np.full(50, 100), started, started + 0.5))
    total = 100 * speed.steps_s(1, 1, 0) + speed.request_s
    assert total == pytest.approx(0.5, rel=0.01) and speed.steps_s(1, 1, 0) > 0


def test_only_the_chosen_trajectories_are_fitted() -> None:
    rows = made_up(0.01, 0.0004)
    rows["finished"][rows["started"] < 30] += 5  # they would mislead a fit
    late = rows | {"fitted": rows["started"] >= 60}
    assert fit(late).step_s == pytest.approx(0.01, rel=0.1)


def test_the_parts_of_a_step_are_averaged() -> None:
    """Two pushes in three steps, of which one follows a resume; the first record is left out."""
    keys = (
        "logged_at", "time_s", "wait_s", "train_s", "push_s", "pause_s", "drain_s", "tokens",
        "trajectories",
    )  # fmt: skip
    rows = [
        (100.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9, 9),
        (110.0, 10.0, 3.0, 4.0, 1.5, 0.5, 0.5, 800, 10),
        (990.0, 10.0, 1.0, 6.0, 0.0, None, None, 1200, 10),
        (1000.0, 10.0, 2.0, 5.0, 4.0, 0.5, 2.0, 1000, 10),
    ]
    speed = _trainer_speed([dict(zip(keys, row)) for row in rows], prompt_tokens=20.0, ranks=2)
    assert speed.per_token_s == pytest.approx(15 * 2 / (3000 + 600))
    assert (speed.pause_s, speed.prepare_s) == (0.5, 1.0)
    assert speed.fixed_s == pytest.approx((30 - 6 - 15 - 5.5) / 3)
