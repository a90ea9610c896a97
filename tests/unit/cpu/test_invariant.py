"""Batch-invariant products and seeded sampling without a GPU."""

import math

import pytest
import torch

from areal_lite.cpu.sglang import invariant

_M = 0xFFFFFFFF


def murmur(blocks: list[int]) -> int:
    """MurmurHash3_x86_32 of blocks of 32 bits, with seed 0."""

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & _M

    state = 0
    for block in blocks:
        block = rotate(block * 0xCC9E2D51 & _M, 15) * 0x1B873593 & _M
        state = (rotate(state ^ block, 13) * 5 + 0xE6546B64) & _M
    state ^= 4 * len(blocks)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & _M
    return state ^ state >> 16


def chosen(logprobs: list[float], seed: int, position: int) -> int:
    """The token with the largest sum of log-probability and Gumbel noise."""

    def noisy(token: int) -> float:
        uniform = murmur([seed & _M, seed >> 32 & _M, position, token]) / _M
        return logprobs[token] - math.log(max(-math.log(max(uniform, 1e-300)), 2.0**-32))

    return max(range(len(logprobs)), key=noisy)


def test_the_hash_of_these_tests_is_murmur_hash_3() -> None:
    assert murmur([0]) == 0x2362F9DE and murmur([]) == 0


def test_it_samples_as_sglang_does() -> None:
    random = torch.Generator().manual_seed(1)
    logprobs = torch.log_softmax(3 * torch.randn(40, 50, generator=random), -1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=random)
    positions = torch.randint(0, 10_000, (40,), generator=random)
    got = invariant.multinomial_with_seed(logprobs, seeds, positions)
    assert got.shape == (40, 1)
    assert got.view(-1).tolist() == [
        chosen(row.tolist(), int(seed), int(position))
        for row, seed, position in zip(logprobs, seeds, positions)
    ]


def test_positions_are_a_stream_with_the_right_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    count = 20_000
    tokens = invariant.multinomial_with_seed(
        probabilities.log().expand(count, -1),
        torch.full((count,), 12345),
        torch.arange(count),
    )
    shares = torch.bincount(tokens.view(-1), minlength=5) / count
    assert (shares - probabilities).abs().max() < 0.015 and shares[4] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(96, 72), (896, 512)])
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, inner: int, columns: int) -> None:
    random = torch.Generator().manual_seed(2)
    rows = torch.randn(300, inner, generator=random).to(dtype)
    weight = torch.randn(columns, inner, generator=random).to(dtype)
    bias = torch.randn(columns, generator=random).to(dtype)
    linear = invariant.in_blocks(torch.nn.functional.linear)
    matmul = invariant.in_blocks(torch.matmul)
    whole, whole_matmul = linear(rows, weight, bias), matmul(rows, weight.t())
    for count in (*range(1, 40), 63, 129, 299):
        for start in (0, 300 - count):
            part = slice(start, start + count)
            assert torch.equal(linear(rows[part], weight, bias), whole[part]), count
            assert torch.equal(matmul(rows[part], weight.t()), whole_matmul[part]), count


def test_products_of_other_shapes_are_left_alone() -> None:
    matmul = invariant.in_blocks(torch.matmul)
    a, b = torch.ones(3, 2, 5), torch.ones(3, 5, 4)
    assert torch.equal(matmul(a, b), torch.matmul(a, b))
    assert matmul(torch.ones(5), torch.ones(5)) == 5


def test_a_machine_whose_rows_depend_on_others_is_refused(monkeypatch) -> None:
    def mm(rows, weight):
        return rows @ weight + rows[0, 0]

    monkeypatch.setattr(torch, "mm", mm)
    with pytest.raises(RuntimeError, match="server.deterministic=true: .* set it to false"):
        invariant.install_products(torch.float32)
