"""Equal rows of a prefill without a GPU are computed once."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.cpu.kernels.paged_attention import PAGE, copy_tokens, find_alike

# Which cached tokens a request extends, and by which tokens.
REQUEST = st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=3))


def prefill(requests: list, mode: bool = True) -> tuple[SimpleNamespace, np.ndarray]:
    """Return the batch of these requests, and the slots of their tokens."""
    slots = np.arange(64).reshape(8, 8)
    for row, (cached, _) in enumerate(requests):
        slots[row, :cached] = np.arange(cached) + 1000 * cached
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: mode),
        input_ids=torch.tensor(sum((tokens for _, tokens in requests), [])),
        req_pool_indices=torch.arange(len(requests)),
        extend_prefix_lens=torch.tensor([cached for cached, _ in requests]),
        extend_seq_lens=torch.tensor([len(tokens) for _, tokens in requests]),
    ), slots


@given(st.lists(REQUEST, min_size=1, max_size=8))
def test_rows_are_alike_if_their_requests_are(requests):
    batch, slots = prefill(requests)
    owners = [(request, i) for request in requests for i in range(len(request[1]))]
    alike = find_alike(batch, slots)
    if alike is None:
        assert len({str(request) for request in requests}) == len(requests)
        return
    assert len(alike.rows) == len({str(owner) for owner in owners})
    assert sorted([*alike.rows, *alike.others]) == list(range(len(owners)))
    for row, owner in enumerate(owners):
        assert owners[alike.rows[alike.place[row]]] == owner
    for other, source in zip(alike.others, alike.source, strict=True):
        assert source in alike.rows and owners[source] == owners[other]


def test_decode_steps_are_not_searched():
    assert find_alike(*prefill([(1, [1]), (1, [1])], mode=False)) is None


def test_keys_and_values_are_copied_to_other_slots():
    rng = np.random.default_rng(0)
    keys, values = rng.random((4, 2, 3, PAGE)), rng.random((4, PAGE, 2, 3))
    before = keys.copy(), values.copy()
    old, new = np.array([PAGE + 3, PAGE + 4]), np.array([3 * PAGE, 3 * PAGE + 1])
    copy_tokens(keys, values, old, new)
    for a, b in zip(old, new, strict=True):
        assert (keys[3, :, :, b % PAGE] == before[0][1, :, :, a % PAGE]).all()
        assert (values[3, b % PAGE] == before[1][1, a % PAGE]).all()
    assert (keys[:3] == before[0][:3]).all() and (keys[3, :, :, 2:] == before[0][3, :, :, 2:]).all()
    assert (values[:3] == before[1][:3]).all() and (values[3, 2:] == before[1][3, 2:]).all()
