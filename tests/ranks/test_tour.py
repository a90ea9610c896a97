"""The tour does what the project does: the same update, the same bound of staleness."""

from pathlib import Path

import numpy as np
import pytest
import torch

from areal_lite import tour
from areal_lite.config import RolloutConfig, TrainConfig, TrainerConfig
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.train_batch import TrainBatch
from areal_lite.trainer.objective import build_objective
from areal_lite.trainer.step import Models, policy_step


@pytest.fixture(scope="module", autouse=True)
def process_groups():
    yield
    shutdown()


def stale_batch(model, seed: int) -> TrainBatch:
    """Answers of the model at version 0, and at version 2 after a change of its weights."""
    torch.manual_seed(seed)
    rng, server, traces = np.random.default_rng(seed), tour.Server(model), []
    for group in range(6):
        prompt = tour.make_prompt(rng)
        server.requests += [tour.Request(group, i, prompt) for i in range(4)]
    for tick in range(tour.MAX_NEW_TOKENS):
        if tick == 3:
            changed = tour.make_model(seed)
            with torch.no_grad():
                for parameter in changed.parameters():
                    parameter.mul_(0.9)
            server.push(changed, 2)
        traces += [request.trajectory() for request in server.decode()]
    traces.sort(key=lambda trace: (trace.group_id, trace.sample_index))
    assert any(len(trace.segments) == 2 for trace in traces)
    return TrainBatch.from_trajectories(traces)


@pytest.mark.parametrize("seed", [1, 2])
def test_its_update_is_the_trainers(tmp_path: Path, seed: int) -> None:
    model = tour.make_model(seed)
    model.save_pretrained(tmp_path)
    batch = stale_batch(model, seed)
    trainer = TrainerConfig(steps=10, lr=1e-3, adam_eps=1e-5)
    config = TrainConfig(model=str(tmp_path), trainer=trainer, rollout=RolloutConfig())
    policy = Policy(trainer, tmp_path, 1)
    policy_step(Models(policy), build_objective(config), batch, config, version=3)
    trained = {name: tensor for bucket in policy.weights.buckets(2**30) for name, tensor in bucket}

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tour.update(model, tour.make_optimizer(model, lr=1e-3), batch)
    own = model.state_dict()
    assert max((own[name] - before[name]).abs().max() for name in own) > 5e-4, "it learned"
    for name, tensor in trained.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-6)


def test_each_schedule_keeps_its_bound_and_async_is_the_fastest(monkeypatch) -> None:
    monkeypatch.setattr(tour, "STEPS", 8)
    ticks = []
    for schedule in tour.SCHEDULES.values():
        outcome = tour.run(schedule)
        assert len(outcome.rewards) == 8
        assert max(outcome.staleness) <= schedule.max_staleness
        assert (max(outcome.mixed) > 0) == (not schedule.waits)
        ticks.append(outcome.ticks)
    assert ticks == sorted(ticks, reverse=True) and ticks[0] > 1.5 * ticks[-1]


def test_a_token_is_tagged_with_the_weights_that_sampled_it() -> None:
    """The behavior log-probs of a trajectory of two versions are those of both models."""
    torch.manual_seed(0)
    first, second = tour.make_model(1), tour.make_model(2)
    server = tour.Server(first)
    server.requests = [tour.Request(0, i, np.array([3, 15], np.int32)) for i in range(16)]
    done = server.decode() + server.decode()
    server.push(second, 1)
    while server.requests:
        done += server.decode()
    batch = TrainBatch.from_trajectories([request.trajectory() for request in done])
    for version, model in enumerate((first, second)):
        of_version = torch.from_numpy(batch.versions == version)
        expected = tour.token_logprobs(model, batch)[of_version]
        found = torch.from_numpy(batch.behavior_logprobs)[of_version]
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)
