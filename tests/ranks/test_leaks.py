"""No token of a sequence changes a result of another one in its microbatch, in any family."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.config import TrainerConfig
from areal_lite.megatron.kernels import kernels
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.train_batch import TrainBatch
from tests.ranks import test_architectures
from tests.ranks.architectures_worker import VOCAB
from tests.ranks.engine_worker import random_batch
from tests.ranks.test_families import FAMILIES, quick_unless_alike

ALL = test_architectures.MODELS | FAMILIES
# Other experts then compute other numbers of rows, and products of other shapes round otherwise.
ROUNDED = [name for name, (_, fields) in ALL.items() if "num_experts_per_tok" in fields]
# In a process group of one rank an update with this rate changes no weight.
FROZEN = dict(steps=10**6, lr=1e-30, clip_grad=0.0)


@pytest.fixture
def policy(tmp_path: Path, monkeypatch, request):
    monkeypatch.setattr(test_architectures, "MODELS", ALL)
    test_architectures.make_model(request.param, tmp_path / "model")
    yield Policy(TrainerConfig(**FROZEN), tmp_path / "model", seed=1)
    shutdown()


def shared_with_others(batch: TrainBatch, chosen: int) -> int:
    """Count the tokens that the chosen sequence begins with as another one does."""
    bounds = batch.cu_seqlens
    sequences = [batch.tokens[a:b] for a, b in zip(bounds, bounds[1:])]
    most = 0
    for number, other in enumerate(sequences):
        length = min(len(other), len(sequences[chosen]))
        same = other[:length] == sequences[chosen][:length]
        most = max(most, length if same.all() else int(same.argmin())) if number != chosen else most
    return most


def results(policy: Policy, batch: TrainBatch, share: bool, chosen: int):
    """Return log-probs and entropies, [2, T], and the gradients of all but the chosen sequence."""
    microbatches = make_microbatches(batch, 10_000, share=share)
    outputs = torch.stack(policy.logprobs_and_entropies(microbatches))
    others = torch.from_numpy(batch.sequence_ids != chosen)

    def loss(logprobs, entropy, microbatch):
        kept = others[microbatch.token_index]
        return ((logprobs + 0.3 * entropy) * kept).sum(), {}

    policy.update(microbatches, loss)
    named = policy.chunks[0].named_parameters()
    return outputs, {name: p.main_grad.clone() for name, p in named if p.requires_grad}


@pytest.mark.parametrize("policy", quick_unless_alike(ALL), indirect=True, ids=str)
@pytest.mark.parametrize("kernel", [True, False])
def test_a_token_changes_nothing_of_other_sequences(policy, kernel, monkeypatch, request):
    if not kernel:
        monkeypatch.setattr(kernels, "packed_attention", None)
    name = request.node.callspec.params["policy"]

    @settings(max_examples=settings.default.max_examples // 10, deadline=None)
    @given(st.integers(0, 2**31), st.booleans(), st.data())
    def check(seed, share, data):
        batch = random_batch(6, VOCAB - 1, seed=seed)
        chosen = data.draw(st.integers(0, 5))
        start, end = batch.cu_seqlens[chosen : chosen + 2]
        # The tree of prefixes stays as it is if the token comes after the first that is its own.
        first = shared_with_others(batch, chosen) + 1 if share else 0
        if start + first >= end:
            return
        place = data.draw(st.integers(int(start + first), int(end - 1)))
        before, gradients = results(policy, batch, share, chosen)
        batch.tokens[place] = VOCAB - 1
        after, changed = results(policy, batch, share, chosen)
        others = batch.sequence_ids != chosen
        tolerance = dict(atol=1e-5, rtol=1e-5) if name in ROUNDED else dict(atol=0, rtol=0)
        torch.testing.assert_close(before[:, others], after[:, others], **tolerance)
        if name in ROUNDED:  # gradients are sums of up to 40, in float32
            largest = max(g.abs().max().item() for g in gradients.values())
            tolerance["atol"] = max(1e-5, 1e-6 * largest)
        torch.testing.assert_close(gradients, changed, **tolerance)
        rest = np.arange(len(batch.tokens))
        own = (rest >= max(place, start + 1)) & (rest < end)
        assert not own.any() or not torch.equal(before[:, own], after[:, own])

    check()
