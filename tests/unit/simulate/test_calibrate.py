"""Calibration: a run directory that a known model made gives that model back."""

from dataclasses import replace

import numpy as np
import pytest

from areal_lite.simulate.calibrate import Trajectories, _trainer_speed, fit_server

RNG = np.random.default_rng(0)


def made_up(step_s: float, per_sequence_s: float, steady: bool = False) -> Trajectories:
    """Trajectories of a server whose steps take longer, the more are in flight."""
    started = np.sort(RNG.uniform(0, 100, 400)) if not steady else np.arange(400) * 1.0
    tokens = RNG.integers(20, 400, 400) if not steady else np.full(400, 100)
    finished = started + 1.0
    for _ in range(60):  # the fixed point of durations and numbers in flight
        in_flight = np.array(
            [
                np.clip(np.minimum(finished, f) - np.maximum(started, s), 0, None).sum() / (f - s)
                for s, f in zip(started, finished)
            ]
        )
        finished = started + tokens * (step_s + per_sequence_s * in_flight)
    prompts = np.full(400, 10)
    return Trajectories(
        groups=np.arange(400) // 4,
        tokens=tokens,
        prompts=prompts,
        started=started,
        finished=finished,
    )


def test_the_time_of_a_step_is_found() -> None:
    rows = made_up(0.01, 0.0004)
    speed = fit_server(rows, rows, servers=1)
    assert speed.step_s == pytest.approx(0.01, rel=0.02)
    assert speed.per_sequence_s == pytest.approx(0.0004, rel=0.02)


def test_two_servers_have_half_the_sequences_each() -> None:
    rows = made_up(0.01, 0.0004)
    speed = fit_server(rows, rows, servers=2)
    assert speed.per_sequence_s == pytest.approx(0.0008, rel=0.02)


def test_only_the_chosen_trajectories_are_fitted() -> None:
    rows = made_up(0.01, 0.0004)
    wrong = replace(rows, finished=np.where(rows.started < 30, rows.finished + 5, rows.finished))
    assert len(wrong.after(50).tokens) < len(wrong.tokens)
    assert fit_server(wrong.after(60), wrong, 1).step_s == pytest.approx(0.01, rel=0.1)


def test_the_parts_of_a_step_are_averaged() -> None:
    """Two pushes in three steps; the first record only says when the second step began."""
    keys = ("logged_at", "wait_s", "train_s", "push_s", "pause_s", "tokens", "trajectories")
    rows = [
        (100.0, 9.0, 9.0, 9.0, 9.0, 9, 9),
        (110.0, 3.0, 4.0, 1.0, 0.5, 800, 10),
        (120.0, 1.0, 6.0, 0.0, None, 1200, 10),
        (130.0, 2.0, 5.0, 2.0, 0.5, 1000, 10),
    ]
    speed = _trainer_speed([dict(zip(keys, row)) for row in rows], prompt_tokens=20.0, ranks=2)
    assert speed.per_token_s == pytest.approx(15 * 2 / (3000 + 600))
    assert (speed.pause_s, speed.prepare_s) == (0.5, 1.0)
    assert speed.fixed_s == pytest.approx((30 - 6 - 15 - 3) / 3)
