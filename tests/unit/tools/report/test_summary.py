"""The summary of the run `hand_made` (synthetic_run.py) against counts by hand."""

import json
import sqlite3

import pytest
from rich.console import Console

from areal_lite.config import ReplayConfig, save_config
from areal_lite.run_dir.metrics import append_event
from areal_lite.system.files import write_json
from areal_lite.tools.report.charts import charts_of
from areal_lite.tools.report.rollouts import sample_groups
from areal_lite.tools.report.run_data import read_run
from areal_lite.tools.report.summary import build_summary, count_facts, summary_table
from tests.unit.tools.audit.history import lived
from tests.unit.tools.report.synthetic_run import GROUPS, T0, config_of, hand_made


@pytest.fixture
def complete(tmp_path):
    config = hand_made(tmp_path)
    return build_summary(tmp_path, config, T0 - 30, T0 + 20)


def text_of(summary):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary_table(summary))
    return capture.get()


def test_the_accuracy_after_training_is_the_worse_of_the_two(complete):
    assert complete["accuracy_before"] == 0.20 and complete["accuracy_after"] == 0.60
    assert [
        complete[key]
        for key in ("greedy_before", "greedy_after", "sampled_before", "sampled_after")
    ] == [0.30, 0.60, 0.20, 0.70]


def test_rates_count_what_was_trained_on_since_the_first_trajectory(complete):
    # Used: 30 + 60 + 50 + 20 tokens in 4 trajectories, from T0 + 1 to T0 + 11. The 1000 tokens of
    # the unused trajectory do not count.
    assert (complete["tokens"], complete["trajectories"]) == (160, 4)
    assert complete["training_s"] == pytest.approx(10.0)
    assert complete["tokens_per_s"] == pytest.approx(16.0)
    assert complete["trajectories_per_s"] == pytest.approx(0.4)
    assert complete["wall_s"] == pytest.approx(50.0)


def test_evaluations_that_began_later_are_none_before_training(tmp_path):
    """A run may get its first held-out problems when it is resumed."""
    config = hand_made(tmp_path)
    lines = (tmp_path / "evals.jsonl").read_text().splitlines()
    (tmp_path / "evals.jsonl").write_text(f"{lines[1]}\n")
    summary = build_summary(tmp_path, config, T0, T0 + 50)
    assert summary["accuracy_before"] is None and summary["accuracy_after"] == 0.60


def test_a_replay_buffer_has_no_bound(tmp_path):
    config = hand_made(tmp_path)
    config.buffer.replay.capacity = 8
    save_config(config, tmp_path)
    assert build_summary(tmp_path, config, T0, T0 + 50)["staleness_bound"] is None


def test_draws_from_a_replay_buffer_count_each_time(tmp_path):
    """As in the metrics of the steps; the store has a trajectory once."""
    replay = ReplayConfig(capacity=6, recency_probability=0.3)
    run_dir = lived(tmp_path / "run", buffer__replay=replay).run_dir
    run = read_run(run_dir)
    facts = count_facts(run)
    for key in ("trajectories", "tokens"):
        assert facts[key] == sum(line[key] for line in run.metrics)
    assert facts["trajectories"] > (run.columns.step >= 0).sum()
    counts = charts_of(run)["staleness_histogram"]["counts"]
    assert len(counts) == 1 + max(line["staleness_max"] for line in run.metrics)
    assert sum(counts) == facts["tokens"]


def test_importance_weights_are_of_the_group_that_is_shown(tmp_path):
    """A batch from a replay buffer has groups of its own, with numbers that other groups have."""
    for capacity, known in ((0, True), (8, False)):
        run_dir = tmp_path / f"run-{capacity}"
        run_dir.mkdir()
        config = hand_made(run_dir)
        config.buffer.replay.capacity = capacity
        save_config(config, run_dir)
        with sqlite3.connect(run_dir / "trajectories.sqlite") as db:
            db.execute("INSERT INTO draws VALUES (0, 0, 0, 0, 0)")
        prox = {"0": [-1.0] * 30, "1": [-1.0] * 60}
        append_event(run_dir, "proximal", {"step": 0, "group_id": 0, "prox": prox})
        first = next(iter(sample_groups(read_run(run_dir))))
        assert first["group"] == 0
        assert (first["samples"][0]["weights"] is not None) == known


def test_staleness_segments_and_pushes(complete):
    assert (complete["staleness_mean"], complete["max_staleness"], complete["staleness_bound"]) == (
        0.75,
        2,
        2,
    )
    # Two of the four used trajectories. The unused one has two versions, too.
    assert complete["multi_segment_share"] == 0.5
    assert (complete["pushes"], complete["pause_s_mean"], complete["pause_s_max"]) == (
        2,
        pytest.approx(0.2),
        0.3,
    )
    assert (complete["steps"], complete["steps_planned"]) == (2, 2)


def test_clipping_and_weights_of_the_steps_that_have_them(tmp_path):
    config = hand_made(tmp_path)
    log = tmp_path / "metrics.jsonl"
    first, second = map(json.loads, log.read_text().splitlines())
    first |= {"clip_fraction": 0.001, "weight_max": 2.0}
    second |= {"clip_fraction": 0.004, "weight_max": 1.5}
    log.write_text("".join(json.dumps(step) + "\n" for step in (first, second)))
    summary = build_summary(tmp_path, config, 0.0, 1.0)
    shown = text_of(summary)
    assert "decoupled PPO" in shown
    assert "0.25% of tokens clipped, behavior weights up to 2" in shown


def test_a_loss_that_clips_nothing_shows_a_dash(tmp_path):
    config = hand_made(tmp_path)
    config.algo.loss = "tb"
    log = tmp_path / "metrics.jsonl"
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps({**step, "weight_max": 1.5}) + "\n" for step in steps))
    shown = text_of(build_summary(tmp_path, config, 0.0, 1.0))
    assert "off-policy data" in shown and "decoupled" not in shown
    assert "– of tokens clipped, behavior weights up to 1.5" in shown


def test_totals_of_the_controller(complete):
    assert complete["groups"] == GROUPS
    assert (complete["requests_drained"], complete["trajectories_lost"]) == (0, 0)


def test_the_totals_count_what_was_lost_and_drained(tmp_path):
    config = hand_made(tmp_path)
    write_json(tmp_path / "controller_totals.json", {"drained": 7, "trajectories_lost": 3})
    summary = build_summary(tmp_path, config, 0.0, 1.0)
    assert (summary["requests_drained"], summary["trajectories_lost"]) == (7, 3)


def test_without_totals_the_store_tells_what_is_missing(tmp_path):
    config = hand_made(tmp_path, killed=True)
    assert build_summary(tmp_path, config, 0.0, 1.0)["trajectories_lost"] == 0
    with sqlite3.connect(tmp_path / "trajectories.sqlite") as db:
        db.execute("DELETE FROM trajectories WHERE group_id = 0 AND sample_index = 1")
    db.close()
    assert build_summary(tmp_path, config, 0.0, 1.0)["trajectories_lost"] == 1


def test_a_killed_run_has_the_values_that_it_got_to(tmp_path):
    config = hand_made(tmp_path, killed=True)
    summary = build_summary(tmp_path, config, T0, T0 + 10)
    assert (summary["steps"], summary["trajectories"], summary["tokens"]) == (1, 2, 90)
    assert summary["tokens_per_s"] == pytest.approx(90 / 5)
    assert (
        summary["accuracy_before"] == 0.20
        and summary["accuracy_after"] is None
        and summary["controller"] is None
    )
    json.dumps(summary, allow_nan=False)
    assert "30.0% → –" in text_of(summary)


def test_an_evaluation_without_samples_still_has_an_accuracy_after(tmp_path):
    config = config_of(tmp_path, 2, 1)
    save_config(config, tmp_path)
    for version, greedy in ((0, 0.1), (2, 0.4)):
        append_event(
            tmp_path,
            "evals",
            {"version": version, "greedy": greedy, "sampled": None, "problems": 5},
        )
    summary = build_summary(tmp_path, config, 0.0, 1.0)
    assert summary["accuracy_before"] is None and summary["accuracy_after"] == 0.4


def test_a_run_that_did_nothing(tmp_path):
    config = config_of(tmp_path, 2, 1)
    save_config(config, tmp_path)
    summary = build_summary(tmp_path, config, 0.0, 1.0)
    assert (
        summary["steps"] == 0
        and summary["tokens_per_s"] is None
        and summary["multi_segment_share"] is None
    )
    assert "0 of 2" in text_of(summary)


def test_no_such_run(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        build_summary(tmp_path / "nowhere", config_of(tmp_path, 2, 1), 0.0, 1.0)


def test_the_table_has_every_value(complete):
    text = text_of(complete)
    for part in (
        "30.0% → 60.0%",
        "20.0% → 70.0%",
        "2 of 2",
        "16 tokens/s, 0.4 trajectories/s",
        "mean 0.75, largest 2, bound 2",
        "50.0%",
    ):
        assert part in text
    assert "mean 200 ms, longest 300 ms" in text and "0:50" in text
