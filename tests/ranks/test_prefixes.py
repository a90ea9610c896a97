"""Shared prefixes change no result: random tries against transformers and the plain layout."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_lite.config import TrainerConfig
from areal_lite.megatron import attention
from areal_lite.megatron.kernels import kernels
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Critic, Policy, TrainableModel
from areal_lite.train_batch import TrainBatch
from areal_lite_quickstart.command import MakeModelConfig
from areal_lite_quickstart.make_model import run as make_model
from tests.unit.megatron.sequences import tries

FROZEN = dict(steps=10**6, lr=1e-30, clip_grad=0.0)
SAME = {  # a parameter of Megatron-core -> that of transformers with the same layout
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.layers.0.self_attention.linear_proj.weight": "model.layers.0.self_attn.o_proj.weight",
    "decoder.layers.0.mlp.linear_fc2.weight": "model.layers.0.mlp.down_proj.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prefixes") / "model"
    make_model(MakeModelConfig(out=str(out), hidden_size=32, num_layers=2, head_dim=16))
    return out


@pytest.fixture(scope="module")
def policy(folder):
    yield Policy(TrainerConfig(**FROZEN), folder, seed=1)
    shutdown()


@pytest.fixture(scope="module")
def critic(folder, policy) -> Critic:
    model = Critic(TrainerConfig(**FROZEN), folder, seed=1)
    with torch.no_grad():
        model.chunks[-1].output_layer.weight.normal_()
    return model


@pytest.fixture(scope="module")
def exact(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def gradients(model: TrainableModel) -> dict[str, torch.Tensor]:
    chunk = model.chunks[0]
    return {name: p.main_grad.double().clone() for name, p in chunk.named_parameters()}


def results(policy: Policy, batch: TrainBatch, weights: torch.Tensor, **packing):
    """Return log-probs and entropies, [T], and the gradients of their weighted sum."""
    microbatches = make_microbatches(batch, **packing)
    outputs = torch.stack(policy.logprobs_and_entropies(microbatches))

    def loss(logprobs, entropy, microbatch):
        one, two = weights[:, microbatch.token_index].float()
        return (one * logprobs + two * entropy).sum(), {}

    policy.update(microbatches, loss)
    return outputs, gradients(policy)


def draw_weights(batch: TrainBatch, scored: np.ndarray) -> torch.Tensor:
    """Draw weights of log-probs and entropies, float64 [2, T]; 0 where nothing is scored."""
    first = np.isin(np.arange(len(batch.tokens)), batch.cu_seqlens)
    weights = torch.randn(2, len(batch.tokens), dtype=torch.float64)
    return weights * torch.from_numpy(scored & ~first)


def by_transformers(model, batch: TrainBatch, weights: torch.Tensor):
    """Compute the same, one sequence after the other."""
    model.zero_grad()
    logprobs, entropies = torch.zeros(2, len(batch.tokens), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:]):
        tokens = torch.from_numpy(batch.tokens[start:end]).long()
        x = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        logprob, entropy = x.gather(-1, tokens[1:, None])[:, 0], -(x.exp() * x).sum(-1)
        logprobs[start + 1 : end], entropies[start + 1 : end] = logprob.detach(), entropy.detach()
        one, two = weights[:, start + 1 : end]
        total = total + (one * logprob + two * entropy).sum()
    if total.requires_grad:
        total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.stack((logprobs, entropies)), grads


def assert_equal(grads: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Compare gradients, as exactly as float32 adds: tokens that repeat cancel in part."""
    norm = torch.stack([x.norm() for x in wanted.values()]).norm()
    assert wanted.keys() == grads.keys()
    for name, x in wanted.items():
        assert (grads[name] - x).norm() <= 5e-6 * norm + 1e-9, name


examples = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@examples
@given(tries(), st.integers(1, 40), st.randoms(), st.integers(0, 2**31))
def test_results_and_gradients_are_those_of_transformers(
    policy, exact, batch, budget, random, seed
):
    torch.manual_seed(seed)
    scored = np.array([random.random() < 0.7 for _ in batch.tokens])
    weights = draw_weights(batch, scored)
    outputs, grads = results(policy, batch, weights, budget=budget, scored=scored)
    expected, wanted = by_transformers(exact, batch, weights)
    expected = expected * torch.from_numpy(scored)
    torch.testing.assert_close(outputs.double(), expected, atol=2e-6, rtol=0)
    zero = torch.zeros(())
    assert_equal(
        {name: grads[name] for name in SAME}, {m: wanted.get(t, zero) for m, t in SAME.items()}
    )


@examples
@given(tries(), st.integers(1, 40), st.booleans(), st.integers(0, 2**31))
def test_the_plain_layout_has_the_same_gradients(policy, batch, budget, kernel, seed):
    """By the kernel of a machine without a GPU, and by torch with keys that are copied."""
    torch.manual_seed(seed)
    weights = draw_weights(batch, np.ones(len(batch.tokens), bool))
    with pytest.MonkeyPatch.context() as patch:
        if not kernel:
            patch.setattr(kernels, "packed_attention", None)
        shared = results(policy, batch, weights, budget=budget)
        plain = results(policy, batch, weights, budget=budget, share=False)
    torch.testing.assert_close(shared[0], plain[0], atol=2e-6, rtol=0)
    assert_equal(shared[1], plain[1])


@examples
@given(tries(), st.integers(1, 40), st.integers(0, 2**31))
def test_values_and_their_gradients_are_those_of_the_plain_layout(critic, batch, budget, seed):
    torch.manual_seed(seed)
    targets = torch.randn(len(batch.tokens))
    found = []
    for share in (True, False):
        microbatches = make_microbatches(batch, budget, share=share)
        values = critic.values(microbatches)
        critic.update(microbatches, lambda x, m: ((x - targets[m.token_index]).square().sum(), {}))
        found.append((values, gradients(critic)))
    (values, grads), (plain, wanted) = found
    torch.testing.assert_close(values, plain, atol=2e-6, rtol=1e-6)
    assert_equal(grads, wanted)


def varlen(
    query, key, value, bounds_q, bounds_k, longest_q, longest_k, *, window_size, enable_gqa, scale
):
    """Attend as torch's FlashAttention does; autograd keeps `key` and `value` as they are."""
    q, k = (bounds.diff().tolist() for bounds in (bounds_q, bounds_k))
    assert (longest_q, longest_k, window_size) == (max(q), max(k), (-1, 0))
    scores = torch.einsum("qgid,kgd->giqk", query.unflatten(1, (key.shape[1], -1)), key)
    allowed = [torch.ones(a, b, dtype=torch.bool).tril(b - a) for a, b in zip(q, k)]
    scores = scores.masked_fill(~torch.block_diag(*allowed).bool(), float("-inf")) * scale
    return torch.einsum("giqk,kgd->qgid", scores.softmax(-1), value).flatten(1, 2)


@examples
@given(tries(), st.integers(0, 2**31))
def test_flash_attention_gets_copies_of_shared_keys(policy, batch, seed):
    torch.manual_seed(seed)
    weights = draw_weights(batch, np.ones(len(batch.tokens), bool))
    expected = results(policy, batch, weights, budget=10_000, share=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "packed_attention", None)
        build = attention.PackedSequences.build
        patch.setattr(
            attention.PackedSequences, "build", lambda *args: replace(build(*args), segments=None)
        )
        patch.setattr(attention, "varlen_attn", varlen)
        found = results(policy, batch, weights, budget=10_000)
    torch.testing.assert_close(found[0], expected[0], atol=2e-6, rtol=0)
    assert_equal(found[1], expected[1])


def test_copies_of_keys_are_not_kept_for_backward():
    torch.manual_seed(0)
    key, value = torch.randn(2, 6, 2, 4, dtype=torch.float64)
    key.requires_grad_()
    index, kept = torch.tensor([0, 1, 2, 0, 1, 3, 4, 5]), []
    watch = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with watch, attention._seen(key, value, index) as (copied, values):
        out = (copied * values).square().sum()
    assert torch.equal(copied, key[index]) and torch.equal(values, value[index])
    (found,) = torch.autograd.grad(out, key)
    (wanted,) = torch.autograd.grad((key[index] * value[index]).square().sum(), key)
    torch.testing.assert_close(found, wanted)
