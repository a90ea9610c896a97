"""Routing replay with a real server and a real trainer, which would choose other experts itself."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_lite.config import ServerConfig, TrainerConfig
from areal_lite.data.model_folder import expert_layout
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.megatron.experts import changed_share
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.routes import is_recorded, unrecorded
from areal_lite.run_dir.reader import RunReader
from areal_lite.servers.client import SamplingParams, SGLangClient
from areal_lite.servers.fleet import Completion
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.network import free_port
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Trajectory
from tests.unit.servers.test_generate import finished, gate_to

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 300
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def write_model(folder: Path, gates: int, noise: float = 0.0) -> Path:
    """Write a mixture in which four experts at a time have the same router logit.

    Which of them a router chooses is up to rounding. `gates` is the seed of the routers, and
    `noise` the size of what is added to their weights.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from areal_lite_quickstart.make_model import build_char_tokenizer

    tokenizer = build_char_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).float()
    torch.manual_seed(gates)
    with torch.no_grad():
        for layer in model.model.layers:
            rows = 0.2 * torch.randn(2, 64)
            layer.mlp.gate.weight.copy_(rows.repeat_interleave(4, 0))
            layer.mlp.gate.weight.add_(noise * torch.randn(8, 64))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """The first weights, those of a push, and the first ones as a trainer would round them."""
    folder = tmp_path_factory.mktemp("moe")
    return {
        "first": write_model(folder / "first", gates=1),
        "pushed": write_model(folder / "pushed", gates=2),
        "rounded": write_model(folder / "rounded", gates=1, noise=1e-7),
    }


@pytest.fixture(scope="module")
def server(models, tmp_path_factory, current_entry_points) -> Iterator[ServerProcess]:
    server = ServerProcess(
        ServerConfig(args={"enable_return_routed_experts": True}),
        str(models["first"]),
        name="moe",
        port=free_port(),
        seed=1,
        log_path=tmp_path_factory.mktemp("server") / "server.log",
        environment=current_entry_points,
    )
    try:
        server.start()
        asyncio.run(server.wait_ready())
        yield server
    finally:
        server.stop()


async def interrupted(
    server: ServerProcess, models: dict[str, Path], mode: str, prompts: list[np.ndarray]
) -> tuple[int, list[Completion]]:
    """Generate, and push other weights in the middle. Returns the first version and the results."""
    layout = expert_layout(models["first"])
    params = SamplingParams(TOKENS, 1.0, (1,), experts=layout)
    async with SGLangClient(timeout_s=60) as client:

        async def push(model: str, version: int, pause: str) -> None:
            await client.post(server.info, "/pause_generation", {"mode": pause})
            body = {"model_path": str(models[model]), "weight_version": str(version)}
            body["flush_cache"] = pause != "in_place"
            await client.post(server.info, "/update_weights_from_disk", body)
            await client.post(server.info, "/continue_generation", {})

        first = await client.weight_version(server.info) + 1
        await push("first", first, "retract")
        gate = gate_to(client, server.info)
        tasks = [
            asyncio.create_task(finished(gate, server.info, prompt, params, f"{mode}{i}"))
            for i, prompt in enumerate(prompts)
        ]
        running = 0
        while running < len(prompts) // 2:
            (load,) = (await client._get(server.info, "/v1/loads?include=core", json.loads))[
                "loads"
            ]
            running = load["num_running_reqs"]
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        await push("pushed", first + 1, mode)
        return first, await asyncio.gather(*tasks)


def as_batch(prompts: list[np.ndarray], results: list[Completion]) -> TrainBatch:
    def trajectory(prompt: np.ndarray, result: Completion) -> Trajectory:
        given = len(prompt)
        return Trajectory(
            group_id=0,
            prompt_id="p",
            sample_index=0,
            tokens=np.concatenate((prompt, result.tokens)),
            loss_mask=np.repeat([False, True], [given, len(result.tokens)]),
            behavior_logprobs=np.concatenate((np.zeros(given, np.float32), result.logprobs)),
            versions=np.concatenate((np.full(given, -1, np.int32), result.versions)),
            finish_reason=result.finish_reason,
            routes=np.concatenate((result.routes, unrecorded(1, result.routes))),
        ).check()

    return TrainBatch.from_trajectories(list(map(trajectory, prompts, results)))


MIXTURES = ["gpt_oss", "glm4_moe", "deepseek", "moonlight", "qwen3_next", "qwen3_5_moe"]


@pytest.mark.parametrize("family", MIXTURES)
def test_servers_of_other_families_return_the_routes(
    tmp_path, current_entry_points, monkeypatch, family
) -> None:
    """Server and trainer have the same weights, and random models no experts that are close."""
    from tests.integration.test_families import make_model, running

    model = make_model(family, tmp_path / "model", monkeypatch)
    args = {"enable_return_routed_experts": True}
    prompts = [np.arange(start, start + 20, dtype=np.int32) for start in (5, 30)]
    params = SamplingParams(TOKENS // 10, 1.0, (1,), experts=expert_layout(model))

    async def generate(server: ServerInfo) -> list[Completion]:
        async with SGLangClient(timeout_s=60) as client:
            gate = gate_to(client, server)
            await client.post(server, "/update_weights_from_disk", body)
            asked = [finished(gate, server, p, params, str(p[0])) for p in prompts]
            return list(await asyncio.gather(*asked))

    body = {"model_path": str(model), "weight_version": "0"}
    with running(model, tmp_path, current_entry_points, "one", args=args) as (server,):
        results = asyncio.run(generate(server))
    batch = as_batch(prompts, results)
    policy = Policy(TrainerConfig(dtype="float32"), model, seed=1, routing_replay=True)
    own = policy.logprobs(policy.microbatches(batch)).numpy()
    assert np.abs(own - batch.behavior_logprobs)[batch.sampled].max() <= 1e-5
    assert changed_share(policy.chunks) == 0, "the routes are of the right layers and tokens"
    shutdown()


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_replayed_log_probs_are_the_servers(server, models, mode) -> None:
    """Those of the tokens that the first weights sampled, whatever the push did to the request."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 90, n).astype(np.int32) for n in (1, 2, 9, 30, 31, 64) * 3]
    first, results = asyncio.run(interrupted(server, models, mode, prompts))
    batch = as_batch(prompts, results)
    assert set(batch.versions.tolist()) == {-1, first, first + 1}
    policy = Policy(TrainerConfig(), models["rounded"], seed=1, routing_replay=True)
    chosen = batch.versions == first

    def distance(data: TrainBatch) -> np.ndarray:
        own = policy.logprobs(policy.microbatches(data)).numpy()
        return np.abs(own - batch.behavior_logprobs)[chosen]

    assert distance(batch).max() < 5e-5
    assert changed_share(policy.chunks) > 0.1
    # The weights are the same. Only the experts that rounding chooses differ.
    assert distance(replace(batch, routes=None)).max() > 0.1
    shutdown()  # other tests of this process begin with process groups of their own


def areal_lite(*arguments: str) -> None:
    command = [sys.executable, "-m", "areal_lite", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr


def test_a_run_replays_resumes_and_stores(models, tmp_path) -> None:
    def train(steps: int, *more: str) -> list[dict]:
        areal_lite(
            "train",
            "+task=addition",
            f"model={models['first']}",
            f"run_dir={tmp_path / 'run'}",
            "algo.routing_replay=true",
            "reward.function=tests.integration.toy_reward:share_of_letters",
            "rollout={group_size: 4, max_new_tokens: 48, max_concurrent: 32}",
            f"trainer.steps={steps}",
            "trainer={batch_groups: 4, minibatches: 2, lr: 0.003, save_every: 2}",
            "eval.problems=4",
            "sync.verify=true",
            *more,
        )
        text = (tmp_path / "run/metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    assert len(train(3)) == 3
    metrics = train(5, "resume=auto")
    assert [step["step"] for step in metrics] == [1, 2, 3, 4, 5]
    assert all(0 <= step["routes_changed"] <= 1 for step in metrics)
    assert any(step["routes_changed"] > 0 for step in metrics)
    known = [d for step in metrics if (d := step["logprob_diff_sampled"]) is not None]
    assert known and max(known) < 1e-5
    store = RunReader(tmp_path / "run/trajectories.sqlite")
    stored = [t for group, _ in store.finished_groups() for t in group.trajectories]
    store.close()
    assert len(stored) >= 80
    for trajectory in stored:
        routes = trajectory.routes
        assert routes.shape[1:] == (3, 2) and routes.dtype == np.uint8
        assert is_recorded(routes).tolist() == [True] * (len(routes) - 1) + [False]
    with sqlite3.connect(tmp_path / "run/trajectories.sqlite") as db:
        ((size, tokens),) = db.execute(
            "SELECT sum(length(routes)), sum(n_tokens) FROM sequences JOIN trajectories "
            "USING (group_id, sample_index, trace_index)"
        )
    assert size / tokens < 6, "3 layers of top-2"
    areal_lite("diagnose", str(tmp_path / "run"), "--audit", "--tokens")
