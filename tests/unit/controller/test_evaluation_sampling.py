"""Evaluations sample as training does, except for their own settings."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lite.config import RolloutConfig, TrainConfig
from areal_lite.config.data import EvalConfig, sampling_of_evaluation
from areal_lite.config.sections import Sampling
from areal_lite.controller.evaluation import Scores, score_problems
from areal_lite.controller.sources import Dependencies, Source
from areal_lite.data.prompts import Prompt
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.servers.client import SamplingParams, SGLangClient, sampling_params
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.registry import ServerInfo
from areal_lite.tools.commands import EvalCommandConfig
from areal_lite.trajectory import Trajectory
from areal_lite.workers.pool import TaskFailed
from areal_lite_quickstart.make_model import build_char_tokenizer
from tests.fake_sglang import FakeSGLang
from tests.unit.controller.test_dispatcher import FakeFleet, FakeWorkflow

OWN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 30}
TRAINING = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_new_tokens": 12}


class Problems:
    """Two held-out problems."""

    num_prompts: int | None = 2
    num_too_long = 0

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"p{index}", tokens=[5 + index, 6], answer="", text="")


class Free:
    """Rewards of 1."""

    async def score(self, completion: str, answer: str, info: dict) -> float:
        return 1.0


@pytest.fixture
def tokenizer(tmp_path) -> Tokenizer:
    build_char_tokenizer().save_pretrained(tmp_path)
    return Tokenizer(tmp_path)


def asked(tokenizer: Tokenizer, sampling: dict, samples: int) -> tuple[Scores, list[dict]]:
    """Score two problems, and return the scores and the parameters of every request."""
    rollout = RolloutConfig(temperature=0.8, max_new_tokens=12)
    config = TrainConfig(model="", rollout=rollout, eval=EvalConfig(sampling=sampling))
    rewards: Any = Free()
    source = Source(config=config, prompts=None, eval_prompts=Problems(), rewards=rewards)
    parts = Dependencies(sources={"": source}, tokenizer=tokenizer, store=None, clock=lambda: 0.0)

    async def run() -> tuple[Scores, list[dict]]:
        fake, client = FakeSGLang(), SGLangClient(5)
        info = ServerInfo(name="s", url=await fake.start(), api_key=None, tensor_parallel=1, pid=1)
        fleet = Fleet(client, lambda: [info], lambda: None)
        watching = asyncio.create_task(fleet.watch())
        progress: Counter[str] = Counter()
        try:
            scores = await score_problems(source, parts, fleet, 2, samples, "e", progress)
            assert progress["asked"] == progress["scored"] == len(fake.requests)
            return scores, [request["sampling_params"] for request in fake.requests]
        finally:
            watching.cancel()
            await client.close()
            await fake.stop()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("own", "expected"), [({}, TRAINING), (OWN, OWN), ({"top_k": 0}, TRAINING)]
)
def test_samples_have_the_settings_of_the_evaluation(tokenizer, own, expected) -> None:
    scores, requests = asked(tokenizer, own, samples=3)
    assert scores.rewards.shape == (2, 4) and len(requests) == 8
    seen = [{key: request[key] for key in expected} for request in requests]
    assert sum(params == expected for params in seen) == 6
    greedy = expected | {"temperature": 0.0}
    assert sum(params == greedy for params in seen) == 2, "one of each problem"


def test_greedy_samples_would_all_be_the_greedy_one(tokenizer) -> None:
    scores, requests = asked(tokenizer, {"temperature": 0, "max_new_tokens": 7}, samples=3)
    assert scores.rewards.shape == (2, 1) and len(requests) == 2
    assert {request["temperature"] for request in requests} == {0.0}
    record = scores.record()
    assert record["samples"] == 0 and record["sampled"] is None and record["greedy"] == 1


def test_training_samples_from_the_whole_vocabulary(tokenizer) -> None:
    """Whatever an evaluation does: the trainer's log-probs are of the whole vocabulary."""
    config = TrainConfig(model="", eval=EvalConfig(sampling=OWN))
    params = sampling_params(config.rollout.sampling, tokenizer)
    plain = SamplingParams(512, 1.0, tokenizer.eos_ids, tokenizer.vocab_size)
    assert params == plain and (plain.top_p, plain.top_k, plain.evaluates) == (1.0, -1, False)


def test_the_command_has_the_same_names() -> None:
    config = EvalCommandConfig(model="", rollout=RolloutConfig(temperature=0.0), sampling={})
    assert sampling_of_evaluation(config) == Sampling(temperature=0.0, max_new_tokens=512)
    config.sampling = OWN
    assert sampling_of_evaluation(config) == Sampling(**OWN)


class Outage:
    """Rewards of a judge that does not answer until `over`."""

    over = False

    async def score(self, completion: str, answer: str, info: dict) -> float:
        if not self.over:
            raise TaskFailed("timeout", "no verdict of the judge")
        return 1.0


def test_problems_that_lost_their_reward_are_asked_by_the_next_evaluation() -> None:
    async def workflow(episode: Any) -> Trajectory:
        return FakeWorkflow(random.Random(0)).trace(episode, None)

    rewards: Any = Outage()
    source = Source(
        config=TrainConfig(model=""), prompts=None, eval_prompts=Problems(), rewards=rewards
    )
    tokenizer: Any = SimpleNamespace(eos_ids=(1,), vocab_size=98, decode=lambda tokens: "text")
    parts = Dependencies(
        sources={"": source}, tokenizer=tokenizer, store=None, clock=lambda: 0.0, workflow=workflow
    )

    async def run() -> None:
        for failures in (8, 0):
            fleet: Any = FakeFleet()
            scores = await score_problems(source, parts, fleet, 2, 3, "e", Counter())
            assert scores.failures == failures
            rewards.over = True

    asyncio.run(run())
