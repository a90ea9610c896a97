"""Servers without a GPU give the trainer's log-probs for each family, also after pushes.

tests/ranks/test_families.py has the families and compares the trainer with transformers.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_lite.config import TrainConfig, TrainerConfig
from areal_lite.controller.protocol import PushTargets
from areal_lite.data.model_folder import DELTA_NETS, UNTRAINED, check_weights
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.servers.blocking import post
from areal_lite.servers.registry import ServerInfo
from areal_lite.weights.push import WeightPusher
from tests.integration.test_memory_push import push, running
from tests.ranks import test_architectures
from tests.ranks.engine_worker import random_batch
from tests.ranks.test_families import FAMILIES, UNADAPTED

QUICK = ("qwen3_5_moe",)
SERVED = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in FAMILIES
    if name != "smollm3_window"
]
NEW = 30
pytestmark = pytest.mark.timeout(300)


def make_model(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a family's model in one file, and in the form of config.json that SGLang reads."""
    monkeypatch.setitem(test_architectures.MODELS, name, FAMILIES[name])
    test_architectures.make_model(name, folder)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "olmo3":
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if config["model_type"] in DELTA_NETS:
        config["full_attention_interval"] = 1 + config["layer_types"].index("full_attention")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        key: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for key, tensor in load_file(path).items()
    }
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def changed(model: Path, folder: Path) -> Path:
    """Make a model like `model`, with other weights where training changes them."""
    folder.mkdir()
    for path in model.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    torch.manual_seed(5)
    weights = load_file(model / "model.safetensors")
    other = {
        key: x if key.endswith(UNTRAINED) else x * (1 + 0.2 * torch.rand_like(x))
        for key, x in weights.items()
    }
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def generate(server: ServerInfo, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return NEW tokens that follow the prompt, and their log-probs."""
    sampling = {"max_new_tokens": NEW, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    answer = post(server, "/generate", body, 60)
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return answer["output_ids"], logprobs


def trained(model: Path, tokens: list[int]) -> np.ndarray:
    """Return the trainer's log-probs of the last NEW tokens."""
    engine = Policy(TrainerConfig(steps=1, dtype="float32"), model, seed=1)
    batch = random_batch(1, 97, seed=0)
    batch.cu_seqlens, batch.tokens = np.array([0, len(tokens)]), np.array(tokens, np.int32)
    logprobs = engine.logprobs(make_microbatches(batch, 1000)).numpy()
    shutdown()
    return logprobs[-NEW:]


@contextmanager
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", SERVED)
def test_server_and_trainer_agree(tmp_path, current_entry_points, monkeypatch, name):
    model = make_model(name, tmp_path / "model", monkeypatch)
    check_weights(model)
    other = changed(model, tmp_path / "other")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    transports = ("distributed",) * 2 if name in UNADAPTED else ("memory", "distributed")
    pushed = (model, None), *zip((other, model), transports)
    prompts = [list(range(start, start + 20)) for start in (5, 30, 55)]  # none is in the cache
    answers = []
    with running(model, tmp_path, current_entry_points, "one") as (server,), process_group():
        for version, (folder, transport) in enumerate(pushed):
            if transport:
                report = push(folder, [server], transport, version)
                assert report.verified and not report.failed
            answers.append(generate(server, prompts[version]))
    for (folder, _), prompt, (tokens, logprobs) in zip(pushed, prompts, answers):
        expected = trained(folder, prompt + tokens)
        assert np.abs(np.array(logprobs) - expected).max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi4", "olmo3", "qwen3_5"])
def test_a_server_adds_adapters_to_the_matrices_of_its_file(
    tmp_path, current_entry_points, monkeypatch, name
):
    model = make_model(name, tmp_path / "model", monkeypatch)
    merged = changed(model, tmp_path / "merged")
    torch.manual_seed(6)
    weights, adapters = load_file(model / "model.safetensors"), []
    for key in [key for key in weights if "_proj" in key]:
        a, b = torch.randn(2, weights[key].shape[1]), 0.1 * torch.randn(len(weights[key]), 2)
        each = key.removesuffix(".weight")
        adapters += [(f"{each}.lora_A.weight", a), (f"{each}.lora_B.weight", b)]
        weights[key] += 2.0 * b @ a
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    config = TrainConfig(model=str(model))
    config.sync.transport, config.sync.timeout_s = "adapters", 60
    config.trainer.lora.rank, config.trainer.lora.alpha = 2, 4.0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with running(model, tmp_path, current_entry_points, "one") as (server,), process_group():
        stream = SimpleNamespace(buckets=lambda size: iter([adapters]))
        controller = SimpleNamespace(
            begin_push=lambda version: PushTargets([server]), pushed=lambda version, failed: None
        )
        pusher = WeightPusher(stream, torch.device("cpu"), controller, config, model)
        try:
            pusher.push_all(1)
        finally:
            pusher.close()
        prompt = list(range(5, 25))
        tokens, logprobs = generate(server, prompt)
    expected = trained(merged, prompt + tokens)
    assert np.abs(np.array(logprobs) - expected).max() <= 1e-5
