"""The part of gpu.py about mixtures of experts: all experts at once, and one after the other."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_parts import CUDA, DEVICE, GIB, Result, now, peak, random_batch, seconds
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_lite.config import TrainerConfig
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy

SERVER_ARGS: dict[str, str | bool] = {}  # no server is started here
TINY: dict[str, Any] = dict(
    num_hidden_layers=2, hidden_size=64, moe_intermediate_size=32, num_experts=8, vocab_size=256
)
SMALL: dict[str, Any] = dict(  # 0.9B parameters, of which a token uses 0.2B
    num_hidden_layers=8,
    hidden_size=1024,
    moe_intermediate_size=512,
    num_experts=64,
    vocab_size=8192,
)
operators = sys.modules["areal_lite.megatron.kernels"]  # the package's `kernels` is an object


def experts(tiny: bool) -> Result:
    """Compare products, log-probs, speed and memory of grouped experts with those of a loop."""
    numbers, checks = _products(tiny)
    policy = Policy(
        TrainerConfig(lr=1e-5, tokens_per_microbatch=1 << 20, dtype="bfloat16"), _model(tiny), 1
    )
    lengths = np.full(4 if tiny else 16, 64 if tiny else 1024)
    batch = random_batch(lengths, policy.hf_config.vocab_size)
    microbatches, tokens = policy.microbatches(batch), len(batch.tokens)

    def update() -> None:
        policy.update(microbatches, lambda logprobs, *_: (-logprobs.mean(), {}))

    found = {}
    has_grouped = operators._has_grouped_products
    sides = {"grouped": has_grouped if CUDA else lambda *_: True, "looped": lambda *_: False}
    logprobs = {}
    for name, predicate in sides.items():  # before any update
        operators._has_grouped_products = predicate
        logprobs[name] = policy.logprobs(microbatches)
    for name, predicate in sides.items():
        operators._has_grouped_products = predicate
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        forward = seconds(lambda: policy.logprobs(microbatches), 3)
        found[name] = seconds(update, 3)
        numbers[f"{name}: log-probs and update, ms"] = [
            round(1e3 * forward, 1),
            round(1e3 * found[name], 1),
        ]
        numbers[f"{name}: peak, GiB"] = round(peak() / GIB, 2)
    operators._has_grouped_products = has_grouped
    numbers["tokens a second"] = round(tokens / found["grouped"])
    difference = (logprobs["grouped"] - logprobs["looped"]).abs().mean().item()
    numbers["log-probs differ by, nats"] = round(difference, 5)
    checks["log-probs are those of the loop"] = difference < 0.02
    if CUDA and not tiny:
        checks["grouped experts are faster"] = found["grouped"] < found["looped"]
    shutdown()
    return numbers, checks


def _model(tiny: bool) -> Path:
    folder = Path(tempfile.mkdtemp()) / "model"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **(TINY if tiny else SMALL),
        num_experts_per_tok=2 if tiny else 8,
        norm_topk_prob=True,
        num_attention_heads=4 if tiny else 16,
        num_key_value_heads=2 if tiny else 4,
        head_dim=16 if tiny else 64,
        initializer_range=0.04,
        tie_word_embeddings=False,
    )
    with DEVICE:
        Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _products(tiny: bool) -> Result:
    """Compare products of groups of uneven sizes, two of them empty, with float64."""
    torch.manual_seed(0)
    groups, rows, width, hidden = (6, 100, 32, 64) if tiny else (64, 8192, 512, 1024)
    shares = torch.rand(groups).square()
    shares[[0, groups // 2]] = 0.0
    sizes = (shares / shares.sum() * rows).int()
    sizes[-1] += rows - sizes.sum()
    ends = sizes.cumsum(0).int().to(DEVICE)
    given = (rows, hidden), (rows, width), (groups, width, hidden)
    x, y, weight = (torch.randn(size, device=DEVICE).bfloat16() for size in given)
    exact = (
        torch.cat([a @ b.t() for a, b in zip(x.double().split(sizes.tolist()), weight.double())]),
        torch.cat([a @ b for a, b in zip(y.double().split(sizes.tolist()), weight.double())]),
        torch.stack(
            [a.t() @ b for a, b in zip(*(z.double().split(sizes.tolist()) for z in (y, x)))]
        ),
    )
    start = now()
    got = (
        operators.grouped_linear(x, weight, ends),
        operators.grouped_linear(y, weight.transpose(1, 2), ends),
        operators.grouped_sums(y, x, ends),
    )
    numbers = {"the first products, ms": round(1e3 * (now() - start), 2)}
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]
    numbers["errors of products, relative"] = [float(f"{error:.2g}") for error in errors]
    grouped = operators._has_grouped_products(x, weight)
    return numbers, {
        "products are exact to bfloat16": max(errors) < 5e-3,
        "empty groups have zeros": not got[2][sizes.to(DEVICE) == 0].any(),
        "the GPU has grouped products": grouped or not CUDA,
    }
