"""Two ranks together, on real processes over gloo: slices of the vocabulary."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from areal_lite.megatron.logprobs import lm_logprobs
from tests.ranks.processes import call_on_ranks

TOKENS, WIDTH, RANKS = 29, 8, 2
# (ids, rows with padding, chunk, temperature, dtype, float32 head). Padding is part of the last
# slice, or all of it.
CASES = {
    "even": (40, 40, 7, 1.0, torch.float32, False),
    "padded": (37, 48, 7, 0.7, torch.float32, False),
    "one rank has only padding": (20, 48, 30, 1.3, torch.float32, False),
    "bfloat16, float32 head": (37, 40, 7, 0.7, torch.bfloat16, True),
    "bfloat16": (37, 40, 7, 0.7, torch.bfloat16, False),
}


def inputs(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    vocab, rows, _, _, dtype, _ = CASES[name]
    g = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, WIDTH, generator=g).to(dtype) for n in (TOKENS, rows))
    return (
        hidden,
        weight,
        torch.randint(0, vocab, (TOKENS,), generator=g),
        torch.randn(2, TOKENS, generator=g),
    )


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    results = {}
    for name, (vocab, rows, chunk, temperature, _, fp32) in CASES.items():
        hidden, weight, targets, mix = inputs(name)
        hidden, weight = hidden.requires_grad_(), weight.chunk(RANKS)[rank].clone().requires_grad_()
        group = dist.group.WORLD
        logprob, entropy = lm_logprobs(
            hidden, weight, targets, temperature, group, vocab_size=vocab, fp32=fp32, chunk=chunk
        )
        (mix[0] * logprob + mix[1] * entropy).sum().backward()
        results[name] = [logprob.detach(), entropy.detach(), hidden.grad, weight.grad]
        targets[0] = rows - 1
        if vocab < rows:
            results[name + ": padding"] = lm_logprobs(
                hidden, weight, targets, temperature, group, vocab_size=vocab
            )[0][0].item()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("slices")
    call_on_ranks(worker, (str(folder),), RANKS)
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_slices_agree_with_the_whole(results, name):
    vocab, rows, _, temperature, dtype, fp32 = CASES[name]
    hidden, weight, targets, mix = inputs(name)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = (hidden @ weight[:vocab].t() / temperature).log_softmax(-1)
    logprob, entropy = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (mix[0] * logprob + mix[1] * entropy).sum().backward()
    tolerance = 5e-6 if dtype == torch.float32 or fp32 else 0.05
    gradient = 5e-6 if dtype == torch.float32 else 0.02 if fp32 else 0.1
    for rank in range(RANKS):
        got = results[rank][name]
        expected = (logprob, entropy, hidden.grad, weight.grad.chunk(RANKS)[rank])
        for mine, exact, tol in zip(got, expected, (tolerance, tolerance, gradient, gradient)):
            assert torch.allclose(mine.double(), exact, atol=tol, rtol=tol)
    for mine, other in zip(results[0][name][:3], results[1][name][:3]):
        assert torch.equal(mine, other)


def test_padding_has_probability_zero(results):
    padded = [key for key in results[0] if key.endswith(": padding")]
    assert len(padded) == 4
    assert all(result[key] == -math.inf for result in results for key in padded)
