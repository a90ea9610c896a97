"""Each architecture under each kind of layout, on real processes over gloo.

They compute the log-probs of transformers and export the same bits.
"""

import asyncio
import json
import urllib.request
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from areal_lite.config import ServerConfig, TrainerConfig
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.megatron.hf import weight_files
from areal_lite.system.network import free_port
from tests.ranks.architectures_worker import SETTINGS, UPDATES, VOCAB
from tests.ranks.engine_worker import random_batch
from tests.ranks.processes import run_ranks

WORKER = Path(__file__).with_name("architectures_worker.py")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}
BUCKET_BYTES = 40_000

# name -> (architecture, differences from the common sizes). No vocabulary splits evenly over two
# ranks.
MODELS = {
    "qwen2_tied": ("qwen2", {}),
    "qwen3_untied": ("qwen3", {"tie_word_embeddings": False}),
    "llama_tied": ("llama", {}),
    "llama3_untied": (
        "llama",
        {"tie_word_embeddings": False, "rope_parameters": LLAMA3 | {"rope_theta": 1e4}},
    ),
    "mistral_untied": ("mistral", {"tie_word_embeddings": False, "sliding_window": None}),
    "moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "moe_unnormalized": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False}),
    "moe_window": (
        "qwen3_moe",
        EXPERTS | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 6},
    ),
}
# name -> (layout, its models, the models that it also trains)
RUNS = {
    "single": ({}, tuple(MODELS), ("moe", "llama3_untied")),
    "tensor": (
        {"tensor_parallel": 2},
        ("qwen2_tied", "llama3_untied", "moe"),
        ("llama3_untied", "moe"),
    ),
    "pipeline": (
        {"pipeline_parallel": 2},
        ("llama_tied", "llama3_untied", "moe"),
        ("llama_tied", "moe"),
    ),
    "interleaved": (
        {"pipeline_parallel": 2, "virtual_pipeline": 2},
        ("llama_tied", "qwen3_untied", "moe_unnormalized"),
        (),
    ),
    "expert": ({"data_parallel": 2, "expert_parallel": 2}, ("moe", "moe_unnormalized"), ("moe",)),
    "tensor_expert": (
        {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 2},
        ("moe",),
        ("moe",),
    ),
}
SLOW = ("pipeline", "interleaved", "expert", "tensor_expert")


def cases(trained: bool = False) -> list:
    """List (run, model), the parameters of a test."""
    pairs = [
        (run, name)
        for run, (_, models, updated) in RUNS.items()
        for name in (updated if trained else models)
    ]
    return [
        pytest.param(*pair, marks=[pytest.mark.slow] if pair[0] in SLOW else []) for pair in pairs
    ]


def make_model(name: str, folder: Path) -> None:
    architecture, fields = MODELS[name]
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    sizes |= dict(
        tie_word_embeddings=True, max_position_embeddings=256, rms_norm_eps=1e-6, rope_theta=10000.0
    )
    torch.manual_seed(sorted(MODELS).index(name))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **(sizes | fields)))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):  # states that last from several tokens to a sequence
                parameter.uniform_(-5, 0)
            elif key.endswith("conv1d.weight"):  # else the norms after it amplify rounding
                parameter.mul_(5.0)
            elif parameter.ndim == 1:  # norms and biases that matter
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # decides some choices, not all
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.float().save_pretrained(folder, max_shard_size="200KB")
    (folder / "tokenizer.json").write_text("{}")


def launch(
    layout: dict, models: dict[str, str], updated: tuple[str, ...], out: Path, **options: object
) -> list[dict]:
    """Run the worker on all ranks of the layout, and return the results of each rank.

    options: `saved`, a folder of checkpoints of the updated models, which the first layout fills,
    and `lora`, the models whose adapters are trained, too.
    """
    job = {
        "layout": layout,
        "models": models,
        "updated": updated,
        "out": str(out),
        "bucket_bytes": BUCKET_BYTES,
        **options,
    }
    world = TrainerConfig(**layout).world_size
    run_ranks(WORKER, job, out, world)
    return [torch.load(out / f"results-{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    for name in MODELS:
        make_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """results(run): what each of its ranks computed. A run starts once, at its first use."""
    return cache(
        lambda run: launch(
            RUNS[run][0],
            {name: str(folder / name) for name in RUNS[run][1]},
            RUNS[run][2],
            folder / run,
        )
    )


def reference_logprobs(model: torch.nn.Module, batch) -> torch.Tensor:
    logprobs = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:]):
        tokens = torch.from_numpy(batch.tokens[start:end].astype("int64"))
        logp = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        logprobs += [torch.zeros(1), logp.gather(-1, tokens[1:, None])[:, 0]]
    return torch.cat(logprobs)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("run, name", cases())
def test_logprobs_match_transformers(results, folder, run, name):
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    with torch.no_grad():
        expected = reference_logprobs(model, random_batch(8, VOCAB, seed=100))
    for rank in results(run):
        assert (rank[name]["logprobs"] - expected).abs().max() <= 5e-6


@pytest.mark.parametrize("run, name", cases())
def test_export_gives_the_same_bits_back(results, folder, run, name):
    results(run)
    exported = folder / run / name
    before, after = weights_of(folder / name), weights_of(exported)
    assert before.keys() == after.keys() == weight_files(exported).keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    batch = random_batch(4, VOCAB, seed=101)
    with torch.no_grad():
        a, b = (
            reference_logprobs(AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32), batch)
            for f in (folder / name, exported)
        )
    assert torch.equal(a, b)


@pytest.mark.parametrize("run, name", cases())
def test_rank_0_alone_gets_each_tensor_once_in_bounded_buckets(results, folder, run, name):
    first, *others = (rank[name]["buckets"] for rank in results(run))
    assert others == [[]] * len(others)
    expected = {key: tensor.nbytes for key, tensor in weights_of(folder / name).items()}
    assert {key: size for bucket in first for key, size in bucket.items()} == expected
    assert sum(len(bucket) for bucket in first) == len(expected)
    # One parameter (up to three tensors) may be larger than a bucket, and padding counts.
    assert len(first) > 1 and all(
        sum(bucket.values()) <= BUCKET_BYTES or len(bucket) <= 3 for bucket in first
    )


@pytest.mark.parametrize("run, name", cases(trained=True))
def test_updates_match_adamw_on_transformers(results, folder, tmp_path, run, name):
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    betas = (0.9, SETTINGS["adam_beta2"])
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=SETTINGS["lr"],
        betas=betas,
        eps=SETTINGS["adam_eps"],
        weight_decay=0.0,
    )
    got = [rank[name]["metrics"] for rank in results(run)]
    for step in range(UPDATES):
        batch = random_batch(8, VOCAB, seed=step)
        loss = -reference_logprobs(model, batch).sum() / len(batch.tokens)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        optimizer.step()
        for metrics in got:
            assert metrics[step]["loss"] == pytest.approx(loss.item(), rel=2e-5)
            assert metrics[step]["grad_norm"] == pytest.approx(norm.item(), rel=5e-5)
    model.save_pretrained(tmp_path)
    expected, trained = weights_of(tmp_path), weights_of(folder / run / f"{name}_updated")
    assert expected.keys() == trained.keys()
    assert max((expected[key] - trained[key]).abs().max().item() for key in expected) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama3_untied", "mistral_untied", "moe", "moe_unnormalized", "moe_window"]
)
def test_sglang_generates_with_the_log_probs_of_the_export(results, folder, tmp_path, name):
    results("single")
    exported = folder / "single" / name
    server = ServerProcess(
        ServerConfig(),
        str(exported),
        name="test",
        port=free_port(),
        seed=1,
        log_path=tmp_path / "server.log",
    )
    prompt = list(range(5, 25))
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 30, "ignore_eos": True},
        "return_logprob": True,
    }
    try:
        server.start()
        asyncio.run(server.wait_ready())
        request = urllib.request.Request(
            f"{server.info.url}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    finally:
        server.stop()
    tokens = torch.tensor(prompt + answer["output_ids"])
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    with torch.no_grad():
        logp = model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = logp.gather(-1, tokens[len(prompt) :, None])[:, 0]
    got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
