"""The verification of a push: a few rows of each tensor, compared bit by bit."""

import pytest
import torch

from areal_lite.servers.registry import ServerInfo
from areal_lite.weights import readback
from areal_lite.weights.readback import Readback

SERVER = ServerInfo(name="s", url="http://s", api_key=None, tensor_parallel=1, pid=1)
WEIGHTS = {
    "model.layers.0.mlp.down_proj.weight": torch.randn(64, 32),
    "model.layers.0.mlp.up_proj.weight": torch.randn(32, 64),
    "model.norm.weight": torch.randn(64),
}


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, int]]:
    """The names and rows that a server with `WEIGHTS` is asked for."""
    seen = []

    def post(server, path, body, timeout_s):
        seen.append((body["name"], body["truncate_size"]))
        return WEIGHTS[body["name"]][: body["truncate_size"]].tolist()

    monkeypatch.setattr(readback, "post", post)
    return seen


def verify(weights: dict[str, torch.Tensor]) -> int:
    watched = Readback()
    assert list(watched.watch([[*weights.items()]])) == [[*weights.items()]]
    return watched.verify(SERVER, 1.0)


def test_a_matrix_is_compared_by_its_first_rows_only(asked) -> None:
    """A whole matrix of a 7B model would be 1.3 GB of JSON for each server."""
    assert verify(WEIGHTS) == 2
    assert asked == [("model.layers.0.mlp.down_proj.weight", 8), ("model.norm.weight", 64)]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.norm.weight"])
def test_a_difference_in_those_rows_is_found(asked, name) -> None:
    other = WEIGHTS[name].clone()
    other[7] += 1e-6
    with pytest.raises(ValueError, match=f"server s: {name} differs"):
        verify(WEIGHTS | {name: other})
