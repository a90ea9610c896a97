"""The gated delta net against its recurrence, token after token, over tries of sequences."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_lite.megatron import delta_net
from areal_lite.megatron.delta_net import LONGEST, Inputs, Pieces, convolve, over_levels
from areal_lite.megatron.packing import LocalTokens, local_length, local_tokens, make_microbatches
from areal_lite.train_batch import TrainBatch
from tests.unit.megatron.sequences import batch_of

HEADS, KEYS, VALUES, KERNEL = 2, 4, 3, 4
CPU = torch.device("cpu")


def recurrence(inputs: Inputs, path: list[int], state: Tensor | None = None):
    """Return the output at each token of a path [n, heads, d_v], and the state after it."""
    state = torch.zeros(HEADS, KEYS, VALUES) if state is None else state
    outputs = []
    for token in path:
        q, k, v, decay, step = (x[token] for x in inputs)
        state = decay.exp()[:, None, None] * state
        error = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv,h->hkv", k, error, step)
        outputs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outputs), state


def rule(inputs: Inputs, bounds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute pieces of any length as the recurrence says."""
    spans = [range(a, b) for a, b in zip(bounds.tolist(), bounds.tolist()[1:])]
    found = [recurrence(inputs, list(s), state) for s, state in zip(spans, states, strict=True)]
    return torch.cat([out for out, _ in found]), torch.stack([state for _, state in found])


def packed(sequences: list[list[int]]) -> TrainBatch:
    batch = batch_of(list(map(len, sequences)))
    batch.tokens = np.concatenate(sequences).astype(np.int32)
    return batch


@st.composite
def tries(draw) -> tuple[LocalTokens, list[list[int]]]:
    """Draw packed tokens, with padding, and the path of each sequence through them."""
    words = st.lists(st.integers(0, 2**31), min_size=1, max_size=4)
    sizes = st.integers(1, 3 * LONGEST)
    sequences: list[list[int]] = []
    for seed in draw(words):
        generator = np.random.default_rng(seed)
        start: list[int] = []
        if sequences and draw(st.booleans()):
            other = draw(st.sampled_from(sequences))
            start = other[: draw(st.integers(0, len(other)))]
        sequences.append([*start, *generator.integers(1, 1000, draw(sizes)).tolist()])
    share = draw(st.booleans())
    (microbatch,) = make_microbatches(packed(sequences), 10_000, share=share)
    length = local_length(microbatch, 1, draw(st.sampled_from([1, 8])))
    local = local_tokens(microbatch, 1, 0, length)
    node = microbatch.trie.node.tolist()
    bounds = microbatch.cu_seqlens.tolist()
    return local, [node[a:b] for a, b in zip(bounds, bounds[1:])]


def random_inputs(length: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, HEADS, n, generator=generator) for n in (KEYS, KEYS, VALUES))
    decay, step = (torch.rand(length, HEADS, generator=generator) for _ in range(2))
    # A long memory, so that states of several pieces before count.
    return [q, k / k.norm(dim=-1, keepdim=True), v, -0.1 * decay, step]


@pytest.mark.parametrize("fused", [False, True])
@settings(max_examples=25, deadline=None)
@given(trie=tries(), seed=st.integers(0, 2**31))
def test_it_is_the_recurrence_along_each_sequence(fused, trie, seed):
    local, paths = trie
    length = len(local.tokens)
    expected = [x.requires_grad_() for x in random_inputs(length, seed)]
    inputs = [x.detach().clone().requires_grad_() for x in expected]
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(delta_net, "fused_rule", lambda device, dtype: rule)
        pieces = Pieces.build(local, KERNEL, CPU, torch.float32)
    ordered = [delta_net._padded(x, pieces.order) for x in inputs]
    used = rule if fused else delta_net.delta_rule
    out = over_levels(used, tuple(ordered), pieces.levels)[pieces.place]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    total = torch.zeros(())
    for path in paths:
        along, _ = recurrence(tuple(expected), path)
        torch.testing.assert_close(out[path], along, atol=1e-5, rtol=1e-4)
        total = total + (along * weights[path]).sum()
    sum((out[path] * weights[path]).sum() for path in paths).backward()
    total.backward()
    for ours, theirs in zip(inputs, expected):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-3)


@settings(max_examples=25, deadline=None)
@given(trie=tries(), seed=st.integers(0, 2**31))
def test_the_convolution_reads_the_tokens_before_in_the_sequence(trie, seed):
    local, paths = trie
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(local.tokens), 3, generator=generator)
    weight = torch.randn(3, KERNEL, generator=generator)
    got = convolve(x, weight, Pieces.build(local, KERNEL, CPU, torch.float32).taps)
    for path in paths:
        before = torch.nn.functional.pad(x[path].T, (KERNEL - 1, 0))
        along = torch.nn.functional.conv1d(before, weight[:, None], groups=3).T
        torch.testing.assert_close(got[path], along, atol=1e-5, rtol=1e-5)


def test_pieces_are_computed_together_and_shared_tokens_once():
    """Two sequences share a prefix of a piece and a half; a third is on its own."""
    prefix = list(range(LONGEST + LONGEST // 2))
    sequences = [[*prefix, 500, 501], [*prefix, 600], [700, 701]]
    (microbatch,) = make_microbatches(packed(sequences), 10_000)
    local = local_tokens(microbatch, 1, 0, local_length(microbatch, 1))
    pieces = Pieces.build(local, KERNEL, CPU, torch.float32)
    assert len(local.tokens) == len(prefix) + 2 + 1 + 2
    assert [len(level.bounds) - 1 for level in pieces.levels] == [2, 1, 2]
    assert len(set(pieces.levels[2].parents.tolist())) == 1


def test_kernels_of_fla_are_for_half_precision_on_a_gpu():
    assert delta_net.fused_rule("cpu", torch.bfloat16) is None
    assert delta_net.fused_rule("cuda", torch.float32) is None
