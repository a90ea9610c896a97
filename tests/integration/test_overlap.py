"""Pushes in place to a server that overlaps scheduling with computing, as servers on GPUs do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_lite.config import ServerConfig
from areal_lite.servers.blocking import post, start_post
from areal_lite.servers.process import ServerProcess
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.network import free_port
from areal_lite.weights.broadcast import BroadcastGroup, flatten

REQUESTS, TOKENS, PUSHES = 8, 600, 6
PROMPTS = np.random.default_rng(0).integers(2, 90, (REQUESTS, 16)).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two models that differ in the output layer alone.

    KV caches stay true under both. The log-prob of a token says which model sampled it.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=98,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    folders = [tmp_path_factory.mktemp(name) for name in "ab"]
    for folder in folders:
        Qwen3ForCausalLM(config).float().save_pretrained(folder)
    files = [folder / "model.safetensors" for folder in folders]
    weights = load_file(files[0])
    weights["lm_head.weight"] = 2 * weights["lm_head.weight"]
    save_file(weights, files[1], metadata={"format": "pt"})
    return folders


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def overlapping(models, current_entry_points, tmp_path_factory):
    """A server without a GPU that overlaps all the same."""
    server = ServerProcess(
        ServerConfig(args={"disable_overlap_schedule": False}),
        str(models[0]),
        name="overlapping",
        port=free_port(),
        seed=1,
        log_path=tmp_path_factory.mktemp("overlapping") / "server.log",
        environment=current_entry_points | {"GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        server.start()
        asyncio.run(server.wait_ready(240))
        yield server.info
        log = server.log_path.read_text()
        assert "init custom process group" not in log, "SGLang joined a group without the plugin"
    finally:
        server.stop()


def push_disk(server: ServerInfo, model: Path, version: int) -> None:
    body = {"model_path": str(model), "weight_version": str(version), "flush_cache": False}
    post(server, "/update_weights_from_disk", body, 60)


class Broadcasts:
    """Pushes over a weight group, as the trainer's."""

    def __init__(self):
        self._group = BroadcastGroup("gloo", 60)

    def __call__(self, server: ServerInfo, model: Path, version: int) -> None:
        bucket = flatten(list(load_file(model / "model.safetensors").items()))
        post(server, "/begin_weight_update", {}, 60)
        self._group.send(bucket, [server], version=str(version), flush_cache=False)
        post(server, "/end_weight_update", {}, 60)
        if version % 4 == 0:
            self._group.leave([server])  # the next push makes a new group


def generate_across_pushes(
    server: ServerInfo, models: list[Path], push: Callable, versions: range
) -> list[dict]:
    """Return answers that pushes interrupted. Odd versions are those of the second model."""
    params = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    body = {"sampling_params": params, "return_logprob": True}
    calls = [start_post(server, "/generate", {**body, "input_ids": p}, 120) for p in PROMPTS]
    for version in versions:
        time.sleep(0.3)
        post(server, "/pause_generation", {"mode": "in_place"}, 60)
        push(server, models[version % 2], version)
        post(server, "/continue_generation", {"torch_empty_cache": False}, 60)
    return [call.result() for call in calls]


@torch.no_grad()
def wrong_tags(models: list[Path], answers: list[dict]) -> tuple[int, int]:
    """Return how many tokens carry the tag of the other model, and how many seams there are."""
    trunk = Qwen3ForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    heads = [load_file(folder / "model.safetensors")["lm_head.weight"] for folder in models]
    wrong = seams = 0
    for prompt, answer in zip(PROMPTS, answers):
        meta = answer["meta_info"]
        logprobs, tokens, _ = zip(*meta["output_token_logprobs"])
        hidden = trunk.model(torch.tensor([[*prompt, *tokens]])).last_hidden_state[0]
        hidden = hidden[len(prompt) - 1 : -1]
        chosen = torch.tensor(tokens)[:, None]
        own = [(hidden @ h.T).log_softmax(-1).gather(1, chosen)[:, 0].numpy() for h in heads]
        sampled_by_second = np.abs(own[1] - logprobs) < np.abs(own[0] - logprobs)
        clear = np.abs(own[1] - own[0]) > 0.01
        spans = meta["weight_versions"]
        lengths = [span["end"] - span["start"] for span in spans]
        odd = np.repeat([int(span["version"]) % 2 == 1 for span in spans], lengths)
        wrong += int((clear & (odd != sampled_by_second)).sum())
        seams += len(spans) - 1
    return wrong, seams


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_each_token_is_tagged_with_the_version_that_sampled_it(
    trainer, overlapping, models, transport
) -> None:
    first = 1 if transport == "disk" else 7
    push = push_disk if transport == "disk" else Broadcasts()
    answers = generate_across_pushes(overlapping, models, push, range(first, first + PUSHES))
    wrong, seams = wrong_tags(models, answers)
    print(f"{wrong} tokens at {seams} seams carry the wrong version")
    assert seams >= REQUESTS and wrong == 0
