"""Servers without a GPU give the log-probs of transformers, for each kind of layer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.servers.client import GenerationChunk, SamplingParams, SGLangClient
from areal_lite.system.network import free_port

# Large enough for products by oneDNN. Qwen2 has biases, Qwen3 norms of heads, Llama neither.
SHAPE = dict(
    vocab_size=96,
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=1,
    initializer_range=0.1,
)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=48, tie_word_embeddings=True)),
}
NUM = 40


def make_model(name: str, folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    kind, config = MODELS[name]
    model = kind(config).float()
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def prompt(number: int) -> np.ndarray:
    """Return the prompt of a request. Four have the same, which is computed once."""
    number -= number % 4
    return np.random.default_rng(number).integers(2, 90, 1 + 5 * number).astype(np.int32)


async def completions(server: ServerProcess, *models: str) -> list[list[GenerationChunk]]:
    """Sample after each prompt, all at once, from each model: the first is the server's."""
    await server.wait_ready()
    found = []
    async with SGLangClient(60) as client:
        params = [SamplingParams(20 + 2 * i, 1.0, (1,)) for i in range(NUM)]
        for number, model in enumerate(models):
            if number:
                await client.post(server.info, "/update_weights_from_disk", {"model_path": model})
            found += [
                await asyncio.gather(
                    *(
                        client.generate(server.info, prompt(i), params[i], f"r{number}-{i}", "key")
                        for i in range(NUM)
                    )
                )
            ]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "dtype", "threads", "whose", "tolerance"),
    [
        pytest.param("llama", "float32", 1, "areal_lite's fused", 2e-5, marks=pytest.mark.slow),
        ("qwen2", "float32", 2, "areal_lite's fused", 2e-5),
        pytest.param("qwen3", "float32", 1, "areal_lite's fused", 2e-5, marks=pytest.mark.slow),
        pytest.param("qwen3", "bfloat16", 1, "SGLang's own", 0.2, marks=pytest.mark.slow),
    ],
)
def test_logprobs_are_those_of_transformers(tmp_path, name, dtype, threads, whose, tolerance):
    models = [make_model(name, tmp_path / f"model-{seed}", seed) for seed in (0, 1)]
    config = ServerConfig(device="cpu", args={"dtype": dtype})
    log = tmp_path / "server.log"
    server = ServerProcess(
        config,
        models[0],
        name="s",
        port=free_port(),
        seed=1,
        log_path=log,
        environment={"OMP_NUM_THREADS": str(threads)},
    )
    try:
        server.start()
        found = asyncio.run(completions(server, *models))
    finally:
        server.stop()
    assert f"runs with {whose} layers" in log.read_text()
    for model, chunks in zip(models, found, strict=True):
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
        for i, chunk in enumerate(chunks):
            check_logprobs(reference, prompt(i), chunk, tolerance)


@torch.no_grad()
def check_logprobs(
    reference: torch.nn.Module, prompt: np.ndarray, chunk: GenerationChunk, tolerance: float
) -> None:
    tokens = torch.tensor(np.concatenate([prompt, chunk.tokens]))
    logprobs = reference(tokens[None]).logits[0, :-1].log_softmax(-1)
    sampled = torch.tensor(chunk.tokens)[:, None].long()
    expected = logprobs[-len(chunk.tokens) :].gather(1, sampled)
    found = torch.tensor(chunk.logprobs).double()
    torch.testing.assert_close(found, expected[:, 0], atol=tolerance, rtol=0)
