"""Shards of host memory are gathered in pieces, which are all that a GPU holds of them."""

import pytest
import torch

from areal_lite.megatron import parallel
from areal_lite.megatron.parallel import all_gather_on_host


@pytest.mark.parametrize("size", [1, 7, 8, 9, 24])
def test_every_piece_arrives_in_its_place(size, monkeypatch):
    shards = [torch.arange(size).float() + 100 * rank for rank in range(3)]
    seen: list[int] = []

    def all_gather(pieces, piece, group):
        start = int(piece[0]) - 100  # this is rank 1
        assert torch.equal(piece, shards[1][start : start + len(piece)])
        for rank, received in enumerate(pieces):
            received.copy_(shards[rank][start : start + len(piece)])
        seen.append(len(piece))

    monkeypatch.setattr(parallel.dist, "all_gather", all_gather)
    monkeypatch.setattr(parallel, "_PIECE", 8)
    received = [torch.zeros(size) for _ in shards]
    all_gather_on_host(received, shards[1], None)
    assert all(torch.equal(got, want) for got, want in zip(received, shards, strict=True))
    assert sum(seen) == size and max(seen) <= 8


def test_one_rank_needs_no_collective(monkeypatch):
    monkeypatch.setattr(parallel.dist, "all_gather", lambda *_: pytest.fail("called"))
    received = [torch.zeros(5)]
    all_gather_on_host(received, torch.arange(5).float(), None)
    assert torch.equal(received[0], torch.arange(5).float())
