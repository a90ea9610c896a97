"""The verification of a push: a few rows of each tensor, compared bit by bit."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from areal_lite.config import TrainConfig
from areal_lite.servers.registry import ServerInfo
from areal_lite.weights import push
from areal_lite.weights.recipients import Bucket, PushRecipients, PushReport

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

    monkeypatch.setattr(push, "post", post)
    return seen


def verify(weights: dict[str, torch.Tensor]) -> int:
    return push.verify(SERVER, pushed(weights), 1.0)


def pushed(weights: dict[str, torch.Tensor]) -> Bucket:
    """Push `weights` to no server, and return what there is to verify."""
    config = TrainConfig(model="m")
    config.sync.transport, config.sync.verify = "disk", True
    stream = SimpleNamespace(buckets=lambda size: iter([[*weights.items()]]))
    pusher = push.WeightPusher(stream, torch.device("cpu"), None, config, Path("r"))
    pusher._transport = SimpleNamespace(transfer=lambda _, buckets, apart: list(buckets))
    return pusher._transfer(PushRecipients([], PushReport(version=1), config.sync))


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
