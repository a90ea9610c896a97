"""The average of a model's weights against its closed form, and its life as the weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.megatron.average import WeightAverage

SHAPES = ((3, 4), (5,))


def parameters(generator: torch.Generator, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    decay=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
    updates=st.integers(0, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_average_is_its_closed_form(seed, decay, updates, dtype):
    """sum_i b^(n - i) theta_i / sum_i b^(n - i) in float64, within the hull of the weights."""
    generator = torch.Generator().manual_seed(seed)
    live = parameters(generator, dtype)
    average = WeightAverage(live, decay)
    seen = [[p.detach().double().numpy() for p in live]]
    for _ in range(updates):
        with torch.no_grad():
            for p in live:
                p.add_(torch.randn(p.shape, generator=generator).to(dtype))
        average.update()
        seen.append([p.detach().double().numpy().copy() for p in live])
    shares = np.array([decay ** (updates - i) for i in range(updates + 1)])
    for number, tensor in enumerate(average.tensors):
        history = np.stack([weights[number] for weights in seen])
        expected = np.tensordot(shares, history, 1) / shares.sum()
        assert tensor.dtype == torch.float32
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-5)
        assert (tensor.numpy() >= history.min(0) - 1e-5).all()
        assert (tensor.numpy() <= history.max(0) + 1e-5).all()
    assert average.weight == pytest.approx(shares.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_come_back(dtype):
    live = parameters(torch.Generator().manual_seed(1), dtype)
    average = WeightAverage(live, 0.5)
    storages = [p.data_ptr() for p in live]
    with torch.no_grad():
        for p in live:
            p.mul_(3)
    average.update()
    weights = [p.detach().clone() for p in live]
    with pytest.raises(KeyError), average.as_weights():
        for p, tensor in zip(live, average.tensors):
            assert p.dtype == dtype and torch.equal(p, tensor.to(dtype))
        raise KeyError
    assert [p.data_ptr() for p in live] == storages
    assert all(torch.equal(p, w) for p, w in zip(live, weights))
