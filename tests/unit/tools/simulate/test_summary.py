"""The summary of a run, and Little's law where it is exact."""

from dataclasses import replace

import pytest

from areal_lite.tools.simulate.lengths import RecordedLengths
from areal_lite.tools.simulate.run import simulate
from areal_lite.tools.simulate.speed import ServerSpeed
from areal_lite.tools.simulate.summary import littles_law, summarize
from areal_lite.tools.simulate.trainer import TrainerSpeed
from tests.unit.tools.simulate.test_run import WORK, run_config

ALIKE = replace(WORK, lengths=RecordedLengths([[100, 100]]), share_prompts=False)


def test_shares_add_up_and_every_token_has_an_age() -> None:
    config = run_config()
    summary = summarize(config, WORK, simulate(config, WORK))
    assert summary.train_share + summary.push_share + summary.wait_share == pytest.approx(1)
    server = ("decode_share", "prefill_share", "pause_share", "idle_share")
    assert sum(getattr(summary, name) for name in server) == pytest.approx(1)
    assert sum(summary.staleness) == pytest.approx(1)
    assert summary.staleness_mean == pytest.approx(
        sum(age * share for age, share in enumerate(summary.staleness))
    )
    assert summary.all_tokens_per_s > summary.tokens_per_s


def test_littles_law_is_exact_for_a_trainer_that_never_waits() -> None:
    work = replace(ALIKE, trainer=TrainerSpeed(fixed_s=30, per_token_s=1e-3, pause_s=0.1))
    config = run_config()
    summary = summarize(config, work, simulate(config, work))
    assert summary.tokens_per_s == pytest.approx(1600 / (30 + 960e-3 + 0.1))
    assert littles_law(config, work) == pytest.approx(summary.tokens_per_s)


def test_littles_law_is_close_when_taking_turns_with_equal_lengths() -> None:
    config = run_config(0, "none")
    summary = summarize(config, ALIKE, simulate(config, ALIKE))
    assert littles_law(config, ALIKE) == pytest.approx(summary.tokens_per_s, rel=0.01)


def test_littles_law_is_close_for_servers_that_are_always_full() -> None:
    server = ServerSpeed(step_s=0.01, per_sequence_s=2e-4)
    work = replace(WORK, server=server, trainer=TrainerSpeed(per_token_s=1e-6), steps=60)
    config = run_config(16)
    config.rollout.max_concurrent = 32
    summary = summarize(config, work, simulate(config, work))
    assert littles_law(config, work) == pytest.approx(summary.tokens_per_s, rel=0.12)
