"""The sequences of a batch that show whether server and trainer agree."""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_lite.config import AlgoConfig, TrainConfig
from areal_lite.servers.client import ServerUnreachable
from areal_lite.servers.registry import ServerInfo
from areal_lite.train_batch import TrainBatch
from areal_lite.trainer.loop import LogprobAgreement, difference_of_fresh
from areal_lite.trajectory import Trajectory


def sequence(versions: list[int], kv_version: int, difference: float) -> Trajectory:
    """A prompt of one token, then sampled tokens whose log-probs are `difference` from -1."""
    versions = np.array([-1, *versions], np.int32)
    logprobs = np.where(versions >= 0, -1 - difference, 0).astype(np.float32)
    tokens = np.arange(len(versions), dtype=np.int32)
    return Trajectory(
        group_id=0,
        prompt_id="p",
        sample_index=0,
        tokens=tokens,
        loss_mask=versions >= 0,
        behavior_logprobs=logprobs,
        versions=versions,
        finish_reason="stop",
        reward=1.0,
        kv_version=kv_version,
    ).check()


def test_only_sequences_of_the_current_version_are_compared() -> None:
    during_a_push, queued_during_one, unknown = (
        sequence([4, 5], 4, 0.5),
        sequence([5, 5], 4, 0.5),
        sequence([5], -1, 0.5),
    )
    older, fresh = sequence([4, 4], 4, 0.5), sequence([5, 5, 5], 5, 0.25)
    batch = TrainBatch.from_trajectories([during_a_push, queued_during_one, fresh, older, unknown])
    # The trainer's log-probs of prompts do not matter.
    own = np.where(batch.loss_mask, np.float32(-1), np.float32(7))
    assert difference_of_fresh(batch, own, 5) == 0.25
    assert difference_of_fresh(batch, own, 6) is None


def test_interpolated_log_probs_say_nothing_about_the_trainer() -> None:
    """Compare nothing: for fresh tokens they are the server's own, and would always agree."""
    batch = TrainBatch.from_trajectories([sequence([5, 5], 5, 0.25)])
    config = TrainConfig(model="m", algo=AlgoConfig(prox="loglinear"))
    agreement = LogprobAgreement(config)
    agreement.begin(batch, [])
    prox = torch.from_numpy(batch.behavior_logprobs)
    assert agreement.compare(batch, prox, 5)["logprob_diff"] is None
    agreement = LogprobAgreement(TrainConfig(model="m"))
    assert agreement.compare(batch, prox, 5)["logprob_diff"] == 0.0


def test_servers_score_while_the_trainer_computes(monkeypatch, tmp_path) -> None:
    """Nothing waits before `compare`. A server that failed is left out."""
    batch = TrainBatch.from_trajectories([sequence([3] * n, -1, 0.5) for n in (2, 3, 1)])
    asked: list[tuple[str, list[int], Future]] = []

    def start_post(server, path, body, timeout_s) -> Future:
        asked.append((server.name, body["input_ids"], Future()))
        return asked[-1][2]

    monkeypatch.setattr("areal_lite.trainer.loop.start_post", start_post)
    servers = [
        ServerInfo(name=name, url=f"http://{name}", api_key=None, tensor_parallel=1, pid=1)
        for name in ("a", "b")
    ]
    agreement = LogprobAgreement(TrainConfig(model="m"))
    agreement.begin(batch, servers)
    assert [(name, tokens) for name, tokens, _ in asked] == [
        ("a", [0, 1, 2]),
        ("b", [0, 1, 2, 3]),
        ("a", [0, 1]),
    ]
    own = np.arange(len(batch.tokens), dtype=np.float32)
    asked[0][2].set_result(prompt_answer([1.5, 2.5]))  # own[1:3] = 1, 2
    asked[1][2].set_exception(ServerUnreachable(servers[1], "POST /generate: gone"))
    asked[2][2].set_result(prompt_answer([8.0 - 0.25]))  # own[8] = 8
    result = agreement.compare(batch, torch.from_numpy(own), 9)
    batch.versions[1], own[1] = -1, 0  # of the prompt: the trainer has no log-prob
    assert np.isclose(agreement.compare(batch, torch.from_numpy(own), 9)["logprob_diff"], 0.375)
    assert result["logprob_diff_sampled"] is None
    assert result["logprob_diff_scored"] == result["logprob_diff"]
    assert np.isclose(result["logprob_diff"], (0.5 + 0.5 + 0.25) / 3)

    agreement.begin(batch, [])  # no server has the weights
    assert agreement.compare(batch, torch.from_numpy(own), 9)["logprob_diff"] is None


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"meta_info": {"input_token_logprobs": [1, 2, 3]}}, [1.0, 2.0, 3.0], ["x", 2.0]],
)
def test_an_answer_that_makes_no_sense_is_left_out(monkeypatch, answer) -> None:
    batch = TrainBatch.from_trajectories([sequence([3, 3], -1, 0.5)])
    given: Future = Future()
    numbers = isinstance(answer, list) and answer
    given.set_result(prompt_answer(answer) if numbers else answer)
    monkeypatch.setattr("areal_lite.trainer.loop.start_post", lambda *_: given)
    server = ServerInfo(name="a", url="http://a", api_key=None, tensor_parallel=1, pid=1)
    agreement = LogprobAgreement(TrainConfig(model="m"))
    agreement.begin(batch, [server])
    result = agreement.compare(batch, torch.zeros(len(batch.tokens)), 9)
    assert result["logprob_diff"] is None


def test_busy_servers_may_take_a_small_share_of_the_run(monkeypatch) -> None:
    """The first step may wait for 10 s, later steps for 2 % of the time since. Late calls end."""
    batch = TrainBatch.from_trajectories([sequence([3, 3], -1, 0.5)])
    calls: list[Future] = []
    now, waits = 0.0, []

    def start_post(*_) -> Future:
        calls.append(Future())
        return calls[-1]

    def wait(waited_for, timeout_s):
        nonlocal now
        waits.append(timeout_s)
        now += timeout_s
        return SimpleNamespace(not_done=set(waited_for))

    monkeypatch.setattr("areal_lite.trainer.loop.start_post", start_post)
    monkeypatch.setattr("areal_lite.trainer.loop.wait", wait)
    monkeypatch.setattr("areal_lite.trainer.loop.steady_time", lambda: now)
    server = ServerInfo(name="a", url="http://a", api_key=None, tensor_parallel=1, pid=1)
    agreement = LogprobAgreement(TrainConfig(model="m"))
    for _ in range(3):
        agreement.begin(batch, [server])
        now += 5.0
        result = agreement.compare(batch, torch.zeros(len(batch.tokens)), 9)
        assert result["logprob_diff"] is None
    assert waits == pytest.approx([10.0, 0.1, 0.1])
    assert all(call.cancelled() for call in calls)


def prompt_answer(logprobs: list[float]) -> dict:
    """SGLang's answer with the log-probs of a prompt. The first token has none."""
    entries = [(None, 0, None), *((value, 0, None) for value in logprobs)]
    return {"meta_info": {"input_token_logprobs": entries}}
