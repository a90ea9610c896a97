"""The records of rank 0 that need no process: log-probs of one group, and evaluations."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_lite.config import TrainConfig
from areal_lite.run_dir.metrics import append_event, read_events
from areal_lite.train_batch import TrainBatch
from areal_lite.trainer.loop import Reporter, proximal_record
from areal_lite.trajectory import Trajectory


def trajectory(group_id: int, sample_index: int, sampled: int) -> Trajectory:
    """Make a prompt of two tokens, `sampled` tokens, and one of the environment before the last."""
    versions = np.array([-1, -1, *[3] * (sampled - 1), -1, 3], np.int32)
    return Trajectory(
        group_id=group_id,
        prompt_id="p",
        sample_index=sample_index,
        tokens=np.zeros(len(versions), np.int32),
        loss_mask=versions >= 0,
        behavior_logprobs=np.where(versions >= 0, -1.0, 0.0).astype(np.float32),
        versions=versions,
        finish_reason="stop",
        reward=1.0,
    )


def test_the_sampled_tokens_of_the_first_group_are_recorded() -> None:
    batch = TrainBatch.from_trajectories(
        [trajectory(7, 1, 3), trajectory(4, 0, 2), trajectory(7, 0, 2)]
    )
    prox = -np.arange(len(batch.tokens), dtype=np.float32) / 8
    record = proximal_record(5, batch, prox)
    assert (record["step"], record["group_id"]) == (5, 7)
    assert record["prox"]["1"] == pytest.approx(prox[[2, 3, 5]])
    assert record["prox"]["0"] == pytest.approx(prox[[13, 15]])
    assert set(record["prox"]) == {"0", "1"}


def test_the_traces_of_an_episode_are_recorded_apart() -> None:
    second = replace(trajectory(7, 1, 2), trace_index=1)
    batch = TrainBatch.from_trajectories([trajectory(7, 1, 3), second])
    record = proximal_record(5, batch, np.arange(len(batch.tokens), dtype=np.float32))
    assert {name: len(prox) for name, prox in record["prox"].items()} == {"1.1": 2, "1": 3}


def test_the_longest_samples_of_a_large_group_are_left_out() -> None:
    batch = TrainBatch.from_trajectories(
        [trajectory(7, index, sampled) for index, sampled in enumerate((6000, 3000, 4000, 9000))]
    )
    record = proximal_record(0, batch, np.zeros(len(batch.tokens), np.float32))
    assert list(record["prox"]) == ["1", "2"]


@pytest.mark.parametrize(
    "start, logged, again",
    [
        (0, [], [0]),
        (0, [0], []),
        (3, [0], []),
        (4, [0], [4]),
        (4, [0, 4], []),
        # The weights of version 4 are gone.
        (6, [0], [6]),
        (6, [0, 4], []),
        # After the last step a resync brings the weights to the servers.
        (9, [0, 4], [9]),
        (9, [0, 4, 9], []),
    ],
)
def test_an_evaluation_that_a_kill_ended_is_made_again(
    tmp_path, monkeypatch, start: int, logged: list[int], again: list[int]
) -> None:
    for version in logged:
        append_event(tmp_path, "evals", {"version": version})
    config = TrainConfig(model="m", run_dir=str(tmp_path))
    config.trainer.steps = 9
    asked: list[int] = []
    monkeypatch.setattr(Reporter, "_evaluate", lambda self, version: asked.append(version))
    monkeypatch.setattr("areal_lite.trainer.loop.LogprobAgreement", lambda *_: None)
    config.eval.every, config.trainer.steps = 4, 9
    Reporter(config, tmp_path, None, start)._metrics.close()
    assert asked == again


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_waits_for_an_evaluation_before_the_next_push(
    tmp_path, monkeypatch, deterministic: bool
) -> None:
    evaluation = Future()
    evaluation.set_result({"version": 2, "greedy": 0.5, "sampled": None, "pass_at_k": {}})
    monkeypatch.setattr("areal_lite.trainer.loop.start_daemon", lambda evaluate: evaluation)
    config = TrainConfig(model="m", run_dir=str(tmp_path))
    config.server.deterministic = deterministic
    config.eval.every, config.trainer.steps = 2, 9
    reporter = Reporter(config, tmp_path, None, 2)
    batch = TrainBatch.from_trajectories([trajectory(7, 0, 3)])
    reporter.agreement.begin(batch, [])
    reporter.before_push(2, batch, torch.zeros(len(batch.tokens)))
    assert [e["version"] for e in read_events(tmp_path, "evals")] == [2] * deterministic
