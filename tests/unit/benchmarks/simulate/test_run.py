"""Whole simulated runs: the promises of the real controller, exact repetition, their numbers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.config import BufferConfig, RolloutConfig, ServerConfig, TrainConfig, TrainerConfig
from benchmarks.littles_law import littles_law
from benchmarks.simulate.decoding import ServerSpeed
from benchmarks.simulate.run import Outcome, simulate, summarize
from benchmarks.simulate.workload import (
    LogNormalLengths,
    Loss,
    RecordedLengths,
    TrainerSpeed,
    Workload,
)

WORK = Workload(
    lengths=LogNormalLengths(mean=60, spread=0.8, longest=256),
    server=ServerSpeed(step_s=0.01, per_sequence_s=2e-4, prefill_s=1e-5, kv_tokens=20_000),
    trainer=TrainerSpeed(fixed_s=0.5, per_token_s=1e-4, prepare_s=0.01, pause_s=0.1),
    prompt_tokens=20,
    warm_up=2,
    steps=6,
)


def run_config(
    staleness: int = 4, interrupt: str = "in_place", every: int = 1, **buffer
) -> TrainConfig:
    config = TrainConfig(
        model="m",
        run_dir="r",
        server=ServerConfig(count=2),
        rollout=RolloutConfig(
            group_size=2, max_new_tokens=256, max_concurrent=64, interrupt=interrupt
        ),
        buffer=BufferConfig(max_staleness=staleness, **buffer),
        trainer=TrainerConfig(batch_groups=8, data_parallel=2),
    )
    config.sync.every = every
    return config


def throughput(outcome: Outcome) -> float:
    return sum(record.tokens for record in outcome.records) / outcome.seconds


def comparable(outcome: Outcome) -> dict:
    facts = {name: getattr(outcome, name) for name in ("seconds", "usage", "groups", "counts")}
    records = [
        (r.wait_s, r.train_s, r.push_s, r.tokens, r.staleness.tolist(), r.info)
        for r in outcome.records
    ]
    return {**facts, "records": records}


def test_a_seed_gives_the_same_run_and_another_seed_another() -> None:
    config = run_config()
    first, again = simulate(config, WORK), simulate(config, WORK)
    assert comparable(first) == comparable(again)
    config.seed = 2
    assert comparable(simulate(config, WORK)) != comparable(first)


def test_asynchronous_is_faster_than_one_step_and_that_than_synchronous() -> None:
    sync = throughput(simulate(run_config(0, "none"), WORK))
    one_step = throughput(simulate(run_config(1, "none"), WORK))
    asynchronous = throughput(simulate(run_config(4, "in_place"), WORK))
    assert sync < 0.9 * one_step and one_step < 0.9 * asynchronous


def test_synchronous_steps_are_the_sum_of_their_parts() -> None:
    """Equal lengths: every step generates one batch, trains, and pushes, one after the other."""
    config = run_config(0, "none")
    work = replace(WORK, lengths=RecordedLengths([[100, 100]]), share_prompts=False)
    outcome = simulate(config, work)
    # 16 sequences on 2 servers.
    generation = 8 * 20 * 1e-5 + 100 * (0.01 + 8 * 2e-4)
    training = 0.5 + 8 * (100 + 20) * 1e-4
    step = generation + training + 0.01 + 0.1
    assert outcome.seconds == pytest.approx(6 * step)
    for record in outcome.records:
        assert (record.wait_s, record.train_s) == pytest.approx((generation, training))
        assert record.push_s == pytest.approx(0.11)
        assert record.staleness.tolist() == [1600]


def test_a_trainer_that_is_the_bottleneck_is_never_kept_waiting() -> None:
    work = replace(WORK, trainer=TrainerSpeed(fixed_s=60, per_token_s=0, pause_s=0.1))
    outcome = simulate(run_config(), work)
    assert outcome.seconds == pytest.approx(6 * 60.1)
    assert all(record.wait_s == 0 for record in outcome.records)


@pytest.mark.parametrize("interrupt", ["in_place", "retract", "abort", "none"])
def test_the_grain_hardly_matters(interrupt: str) -> None:
    lengths = LogNormalLengths(mean=600, spread=0.8, longest=2560)
    config = run_config(interrupt=interrupt)
    config.rollout.max_new_tokens = 2560
    fine, coarse = (
        simulate(config, replace(WORK, lengths=lengths, steps=10, grain=grain)) for grain in (1, 20)
    )
    assert throughput(coarse) == pytest.approx(throughput(fine), rel=0.03)


def test_an_abort_sends_requests_again_and_loses_no_token() -> None:
    outcome = simulate(run_config(interrupt="abort"), WORK)
    assert outcome.counts["aborts"] > 0
    assert outcome.counts["requests"] > 2 * outcome.counts["groups"]


def test_lost_servers_lose_no_group_and_return_with_the_trainers_version() -> None:
    config = run_config()
    config.server.count = 4
    config.sync.timeout_s = 12.0
    # Generation is the bottleneck.
    work = replace(WORK, trainer=TrainerSpeed(fixed_s=0.01, per_token_s=0, pause_s=0.01), steps=60)
    whole = simulate(config, work)
    lost = simulate(config, replace(work, loss=Loss(servers=3, after_s=5)))
    back = simulate(config, replace(work, loss=Loss(servers=3, after_s=5, return_s=5)))
    assert throughput(lost) < 0.9 * throughput(back) and throughput(back) < throughput(whole)
    for outcome in (lost, back):
        assert outcome.counts["retries"] > 0 and outcome.counts["failed_rollouts"] == 0
        assert outcome.groups["used"] >= 60 * 8 and outcome.groups["dropped"] == 0


def test_filtered_groups_are_replaced() -> None:
    config = run_config()
    config.rollout.filters = ["zero_variance"]
    outcome = simulate(config, replace(WORK, uniform_share=0.5, steps=20))
    filtered, used = outcome.groups["filtered"], outcome.groups["used"]
    assert 0.35 < filtered / (filtered + used) < 0.65
    assert outcome.counts["filtered"] == filtered


def test_rewards_take_their_time() -> None:
    config = run_config(0, "none")
    slow = simulate(config, replace(WORK, reward_s=3.0))
    assert slow.seconds == pytest.approx(simulate(config, WORK).seconds + 6 * 3.0)


def test_a_batch_that_never_comes_is_an_error() -> None:
    config = run_config()
    config.sync.timeout_s = 7200.0
    with pytest.raises(RuntimeError, match="gets no batch within a day"):
        simulate(config, replace(WORK, loss=Loss(servers=2, after_s=1)))


@given(
    staleness=st.integers(0, 5),
    every=st.integers(1, 3),
    interrupt=st.sampled_from(["in_place", "retract", "abort", "none"]),
    window=st.none() | st.integers(0, 12),
    spread=st.floats(0, 1.5),
    uniform=st.sampled_from([0.0, 0.4]),
    lost=st.none() | st.integers(1, 2),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=25)
def test_no_group_is_lost_and_no_token_is_staler_than_the_bound(
    staleness, every, interrupt, window, spread, uniform, lost, seed
) -> None:
    config = run_config(staleness + every - 1, interrupt, every, window=window)
    if config.max_lead < every - 1:
        config.buffer.max_staleness += every - 1 - config.max_lead
    config.seed = seed
    config.server.count = 3
    config.rollout.filters = ["zero_variance"] if uniform else []
    work = replace(
        WORK,
        lengths=LogNormalLengths(mean=60, spread=spread, longest=256, shared=0.3),
        uniform_share=uniform,
        loss=Loss(servers=lost, after_s=2.0, return_s=4.0) if lost else None,
    )
    outcome = simulate(config, work)
    groups, counts = outcome.groups, outcome.counts
    assert sum(groups.values()) == counts["groups"]
    assert groups["used"] == (work.warm_up + work.steps) * 8
    assert groups["filtered"] == counts["filtered"]
    assert groups["finished"] + groups["in_flight"] <= (config.max_lead + every + 1) * 8
    assert groups["dropped"] == 0
    for record in outcome.records:
        assert len(record.staleness) <= config.buffer.max_staleness + 1
        masked = record.info["masked_tokens"]
        assert record.staleness.sum() + masked == record.tokens
        assert window is None or masked == 0
        assert np.all(record.staleness >= 0)


ALIKE = replace(WORK, lengths=RecordedLengths([[100, 100]]), share_prompts=False)


def test_shares_add_up_and_every_token_has_an_age() -> None:
    config = run_config()
    summary = summarize(simulate(config, WORK))
    assert summary.train_share + summary.push_share + summary.wait_share == pytest.approx(1)
    server = ("decode_share", "prefill_share", "pause_share", "idle_share")
    assert sum(getattr(summary, name) for name in server) == pytest.approx(1)
    assert sum(summary.staleness) == pytest.approx(1)
    assert summary.staleness_mean == pytest.approx(
        sum(age * share for age, share in enumerate(summary.staleness))
    )


def test_littles_law_is_exact_for_a_trainer_that_never_waits() -> None:
    work = replace(ALIKE, trainer=TrainerSpeed(fixed_s=30, per_token_s=1e-3, pause_s=0.1))
    config = run_config()
    summary = summarize(simulate(config, work))
    assert summary.tokens_per_s == pytest.approx(1600 / (30 + 960e-3 + 0.1))
    assert littles_law(config, work) == pytest.approx(summary.tokens_per_s)


def test_littles_law_is_close_when_taking_turns_with_equal_lengths() -> None:
    config = run_config(0, "none")
    summary = summarize(simulate(config, ALIKE))
    assert littles_law(config, ALIKE) == pytest.approx(summary.tokens_per_s, rel=0.01)


def test_littles_law_is_close_for_servers_that_are_always_full() -> None:
    server = ServerSpeed(step_s=0.01, per_sequence_s=2e-4)
    work = replace(WORK, server=server, trainer=TrainerSpeed(per_token_s=1e-6), steps=60)
    config = run_config(16)
    config.rollout.max_concurrent = 32
    summary = summarize(simulate(config, work))
    assert littles_law(config, work) == pytest.approx(summary.tokens_per_s, rel=0.12)
