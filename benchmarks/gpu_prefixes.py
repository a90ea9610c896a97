"""The part of gpu.py about prefixes that are computed once, and about windows.

It returns its numbers and its checks, both by name. `tiny` models also run without a GPU.
"""

import tempfile
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_parts import (
    CUDA,
    DEVICE,
    GIB,
    Result,
    peak,
    random_batch,
    reference_logprobs,
    save_model,
    seconds,
)
from torch import Tensor

from areal_lite.config import TrainerConfig
from areal_lite.megatron.attention import _seen, by_segment, causal_varlen
from areal_lite.megatron.packing import Microbatch, make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.train_batch import TrainBatch

SERVER_ARGS: dict[str, str | bool] = {}  # no server is started here
LAYOUTS = {
    "plain": dict(share=False, scored=False),
    "sampled tokens": dict(share=False, scored=True),
    "shared": dict(share=True, scored=True),
}


class Lengths(NamedTuple):
    """A batch: tokens of a prompt, of its answers, answers to a prompt, and prompts."""

    prompt: int
    answer: int
    group: int
    prompts: int


def prefixes(tiny: bool) -> Result:
    """Train with prefixes computed once and without, and compare log-probs, time and memory."""
    numbers, checks = _attention()
    model = save_model(Path(tempfile.mkdtemp()) / "model", tiny)
    settings = TrainerConfig(
        lr=1e-9, tokens_per_microbatch=400 if tiny else 65536, dtype="bfloat16"
    )
    policy = Policy(settings, model, 1)
    cases = {
        "groups of 8, prompts of 1,024, answers of 512": Lengths(1024, 512, 8, 4),
        "groups of 8, prompts of 256, answers of 1,024": Lengths(256, 1024, 8, 4),
        "24 turns of an agent, 6,000 tokens in the end": Lengths(0, 256, 24, 2),
    }
    if tiny:
        cases = {"tiny": Lengths(24, 10, 4, 3), "turns": Lengths(0, 8, 6, 2)}
    for name, lengths in cases.items():
        batch = grouped_batch(lengths, policy.hf_config.vocab_size)
        more, held = _layouts(policy, model, batch)
        numbers |= {f"{name}: {key}": value for key, value in more.items()}
        checks |= {f"{name}: {key}": value for key, value in held.items()}
    shutdown()
    return numbers, checks


def grouped_batch(lengths: Lengths, vocab: int) -> TrainBatch:
    """Make groups of answers to the same prompt; with prompts of 0 tokens, the turns of an agent.

    Turn n of an agent repeats the turns before it, and samples the last part of its tokens.
    """
    turns = np.arange(1, lengths.group + 1) if not lengths.prompt else np.ones(lengths.group)
    each = (lengths.prompt + turns * lengths.answer).astype(int)
    batch = random_batch(np.tile(each, lengths.prompts), vocab)
    starts = batch.cu_seqlens[:-1].reshape(-1, lengths.group)
    sampled = np.zeros(len(batch.tokens), bool)
    for group in starts:
        longest = batch.tokens[group[-1] : group[-1] + each[-1]].copy()
        for start, length in zip(group, each):
            shared = length - lengths.answer
            batch.tokens[start : start + shared] = longest[:shared]
            if not lengths.prompt:
                batch.tokens[start : start + length] = longest[:length]
            sampled[start + max(shared, 1) : start + length] = True
    versions = np.where(sampled, 0, -1).astype(np.int32)
    return replace(batch, loss_mask=sampled, versions=versions)


def _layouts(policy: Policy, model: Path, batch: TrainBatch) -> Result:
    """Make updates in each layout, in turn, and compare them."""
    mask, count = torch.from_numpy(batch.loss_mask).to(DEVICE), float(batch.loss_mask.sum())

    def loss(logprobs: Tensor, entropy: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict]:
        return -(logprobs * mask[microbatch.token_index]).sum() / count, {}

    numbers: dict[str, Any] = {}
    logprobs: dict[str, Tensor] = {}
    norms: dict[str, float] = {}
    for name, layout in LAYOUTS.items():
        scored = batch.sampled if layout["scored"] else None
        budget = policy.config.tokens_per_microbatch
        microbatches = make_microbatches(batch, budget, scored=scored, share=layout["share"])
        logprobs[name] = policy.logprobs(microbatches).float()[mask]
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        norms[name] = policy.update(microbatches, loss)["grad_norm"]
        taken = seconds(lambda packed=microbatches: policy.update(packed, loss), 3)
        computed = sum(len(m.trie.token) for m in microbatches) / len(batch.tokens)
        numbers[name] = f"computes {computed:.0%}, {1e3 * taken:.0f} ms"
        numbers[name] += f", {peak() / GIB:.1f} GiB"
    few = batch.select(range(min(4, batch.num_sequences)))
    rounding = _rounding(model, few)
    numbers["difference of log-probs, rounding of transformers, nats"] = [
        round((logprobs["shared"] - logprobs["plain"]).abs().mean().item(), 5),
        round(rounding, 5),
    ]
    numbers["norms of the gradient"] = [round(norm, 6) for norm in norms.values()]
    worst = max(abs(norm / norms["plain"] - 1) for norm in norms.values())
    difference = (logprobs["shared"] - logprobs["plain"]).abs().mean().item()
    return numbers, {
        "log-probs agree": difference < 1.6 * rounding,
        "gradients agree": worst < 0.01,
    }


def _rounding(model: Path, batch: TrainBatch) -> float:
    """Return the mean error of transformers' log-probs in bfloat16, in nats."""
    sequences = np.split(batch.tokens, batch.cu_seqlens[1:-1])
    exact, rounded = (
        torch.cat(reference_logprobs(model, dtype, sequences))
        for dtype in (torch.float32, torch.bfloat16)
    )
    return (exact - rounded).abs().mean().item()


def _attention() -> Result:
    """Compare FlashAttention over spans of keys, with windows and without, with float32."""
    numbers, checks = {}, {}
    if not CUDA:
        return numbers, checks
    for window in (None, 2, 16, 100, 1000):
        error = max(_span_error(window, seed) for seed in range(4))
        name = "spans" if window is None else f"spans, window of {window}"
        numbers[f"error, {name}"] = round(error, 4)
        checks[f"{name} are right"] = error < 0.02
    return numbers, checks


@torch.enable_grad()
def _span_error(window: int | None, seed: int, heads: int = 16, groups: int = 4) -> float:
    """Return the largest relative error of the output and of the gradients of random spans.

    Each segment of queries sees the keys of some tokens before it, and its own.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    lengths = rng.integers(1, 200, 12)
    starts = np.cumsum(lengths) - lengths
    seen = [rng.integers(0, start + 1, rng.integers(0, 300)) if start else [] for start in starts]
    index = np.concatenate(
        [[*before, *range(a, a + n)] for before, a, n in zip(seen, starts, lengths)]
    )
    segments = [(int(n), int(n) + len(before)) for n, before in zip(lengths, seen)]
    total = int(lengths.sum())
    tensors = [
        torch.randn(total, n, 64, generator=generator).bfloat16().to(DEVICE)
        for n in (heads, groups, groups, heads)
    ]
    inputs, grad = [x.requires_grad_() for x in tensors[:3]], tensors[3]
    exact_inputs = [x.detach().float().requires_grad_() for x in inputs]
    key_index = torch.from_numpy(index.astype(np.int64)).to(DEVICE)
    bounds = [
        torch.tensor([0, *accumulate(part)], dtype=torch.int32, device=DEVICE)
        for part in zip(*segments)
    ]
    longest = [max(part) for part in zip(*segments)]
    query, key, value = inputs
    with _seen(key, value, key_index) as (keys, values):
        out = causal_varlen(query, keys, values, *bounds, *longest, window)
    query, key, value = exact_inputs
    exact = by_segment(query, key[key_index], value[key_index], segments, window)
    got = (out, *torch.autograd.grad(out, inputs, grad))
    want = (exact, *torch.autograd.grad(exact, exact_inputs, grad.float()))
    errors = [(a.float() - b).norm() / b.norm() for a, b in zip(got, want, strict=True)]
    return torch.stack(errors).max().item()
