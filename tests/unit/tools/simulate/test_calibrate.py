"""Calibration: a run directory that a known model made gives that model back."""

import math

import numpy as np
import pytest

from areal_lite.tools.simulate.decoding import DecodingServer, Generation, ServerSpeed
from areal_lite.tools.simulate.workload import _trainer_speed, fit_server

RNG = np.random.default_rng(0)


def records(columns: dict[str, np.ndarray]) -> np.ndarray:
    return np.rec.fromarrays(list(columns.values()), names=list(columns))


def made_up(step_s: float, per_sequence_s: float, count: int = 400) -> np.ndarray:
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
    prompts = np.full(count, 10)
    return records(
        dict(
            group=np.arange(count) // 4,
            server=np.full(count, "s0"),
            tokens=tokens,
            prompt=prompts,
            started=started,
            finished=finished,
        )
    )


def test_the_time_of_a_step_is_found() -> None:
    rows = made_up(0.01, 0.0004)
    speed = fit_server(rows, rows)
    assert speed.step_s == pytest.approx(0.01, rel=0.02)
    assert speed.per_sequence_s == pytest.approx(0.0004, rel=0.02)


def test_each_server_has_a_load_of_its_own() -> None:
    few, many = made_up(0.01, 0.0004, count=100), made_up(0.01, 0.0004)
    many["server"] = "s1"
    both = np.concatenate([few, many])
    speed = fit_server(both, both)
    assert speed.step_s == pytest.approx(0.01, rel=0.02)
    assert speed.per_sequence_s == pytest.approx(0.0004, rel=0.02)


def modelled(speed: ServerSpeed, bursts: int, size: int) -> np.ndarray:
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
    groups = np.arange(len(tokens))
    return records(
        dict(
            group=groups,
            server=np.full(len(tokens), "s0"),
            tokens=tokens,
            prompt=groups,
            started=started,
            finished=finished,
        )
    )


@pytest.mark.parametrize("size", [1, 30])
def test_the_work_of_the_host_for_a_request_is_found(size: int) -> None:
    speed = ServerSpeed(step_s=0.003, per_sequence_s=5e-5, request_s=0.002)
    rows = modelled(speed, bursts=1500 // size, size=size)
    found = fit_server(rows, rows)
    assert found.step_s == pytest.approx(speed.step_s, rel=0.03)
    assert found.per_sequence_s == pytest.approx(speed.per_sequence_s, rel=0.03)
    assert found.request_s == pytest.approx(speed.request_s, rel=0.03)


def test_equal_lengths_give_a_speed() -> None:
    groups, started = np.arange(50), np.arange(50) * 1.0
    rows = records(
        dict(
            group=groups,
            server=np.full(50, "s0"),
            tokens=np.full(50, 100),
            prompt=groups,
            started=started,
            finished=started + 0.5,
        )
    )
    speed = fit_server(rows, rows)
    total = 100 * speed.steps_s(1, 1, 0) + speed.request_s
    assert total == pytest.approx(0.5, rel=0.01) and speed.steps_s(1, 1, 0) > 0


def test_only_the_chosen_trajectories_are_fitted() -> None:
    rows = made_up(0.01, 0.0004)
    rows["finished"][rows["started"] < 30] += 5  # they would mislead a fit
    late = rows[rows["started"] >= 60]
    assert fit_server(late, rows).step_s == pytest.approx(0.01, rel=0.1)


def test_the_parts_of_a_step_are_averaged() -> None:
    """Two pushes in three steps; the first record only says when the second step began."""
    keys = (
        "logged_at", "wait_s", "train_s", "push_s", "pause_s", "drain_s", "tokens", "trajectories"
    )  # fmt: skip
    rows = [
        (100.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9, 9),
        (110.0, 3.0, 4.0, 1.5, 0.5, 0.5, 800, 10),
        (120.0, 1.0, 6.0, 0.0, None, None, 1200, 10),
        (130.0, 2.0, 5.0, 4.0, 0.5, 2.0, 1000, 10),
    ]
    speed = _trainer_speed([dict(zip(keys, row)) for row in rows], prompt_tokens=20.0, ranks=2)
    assert speed.per_token_s == pytest.approx(15 * 2 / (3000 + 600))
    assert (speed.pause_s, speed.prepare_s) == (0.5, 1.0)
    assert speed.fixed_s == pytest.approx((30 - 6 - 15 - 5.5) / 3)
