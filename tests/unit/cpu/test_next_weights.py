"""A push that is loaded beside a model, and taken in the pause."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from areal_lite.cpu.memory.server import NextWeights
from areal_lite.sglang_plugins.push import adapted_weights
from areal_lite.sglang_plugins.weight_group import AHEAD
from tests.unit.cpu.staged_model import FusedModel, weights

RANK, SCALE = 2, 1.7


class Model(FusedModel):
    """A model whose weights have the names of a checkpoint."""

    def load_weights(self, weights) -> None:
        super().load_weights((name.removesuffix(".weight"), tensor) for name, tensor in weights)


class Server:
    """A server whose checkpoint is `folder`, and which gets `pushed` adapters."""

    def __init__(self, folder: str) -> None:
        self.folder, self.model, self.next = folder, Model(), NextWeights()
        self.model.load_weights(weights().items())
        self.store = dist.HashStore()
        self.updater = SimpleNamespace(
            _model_update_group={"group": SimpleNamespace(store=self.store)},
            get_model=lambda: self.model,
            receive_weights_from_distributed=lambda names, **_: adapted_weights(
                [(name, self.pushed[name]) for name in names], folder, SCALE
            ),
        )

    def load(self, pushed: dict[str, torch.Tensor], names: list[str] | None = None) -> None:
        self.pushed = pushed
        description = json.dumps({"group_name": "group", "names": names or list(pushed)})
        group = ("", 0, 0, 0, AHEAD, description)
        assert self.next.receive(lambda *_: pytest.fail("not SGLang's"), self.updater, *group)[0]

    def wait(self, count: int) -> None:
        while self.store.add(AHEAD, 0) < count:
            pass


@pytest.fixture
def server(tmp_path) -> Server:
    base = {f"{name}.weight": tensor for name, tensor in weights().items()}
    save_file(base, tmp_path / "model.safetensors")
    return Server(str(tmp_path))


def adapters(*names: str, seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    pushed = {}
    for name in names:
        pushed[f"{name}.lora_A.weight"] = torch.randn(RANK, 4)
        pushed[f"{name}.lora_B.weight"] = torch.randn(len(weights()[name]), RANK)
    return pushed


def loaded_at_once(pushed: dict[str, torch.Tensor], folder: str) -> dict[str, torch.Tensor]:
    model = Model()
    model.load_weights(weights().items())
    model.load_weights(adapted_weights(list(pushed.items()), folder, SCALE))
    return model.state_dict()


@pytest.mark.parametrize("split", [False, True], ids=["one bucket", "a parameter in two buckets"])
def test_every_bit_is_that_of_a_load_in_the_pause(server: Server, split: bool) -> None:
    for seed in (1, 2):
        pushed = adapters("q", "k", seed=seed)
        before = server.model.values()
        names = list(pushed)
        for part in (names[:2], names[2:]) if split else (names,):
            server.load(pushed, part)
        server.wait(seed * (2 if split else 1))
        assert server.model.values() == before, "nothing changes before the pause"
        assert server.next.take(server.updater) == []
        for name, expected in loaded_at_once(pushed, server.folder).items():
            assert torch.equal(server.model.get_parameter(name), expected), name


def test_a_parameter_keeps_what_no_adapter_changes(server: Server) -> None:
    pushed = adapters("q")
    server.load(pushed)
    server.next.take(server.updater)
    assert torch.equal(server.model.qk[4:], weights()["k"])
    assert not torch.equal(server.model.qk[:4], weights()["q"])


def test_the_pause_copies_nothing(server: Server) -> None:
    server.load(adapters("q", "k"))
    server.wait(1)
    (copy,) = server.next._copies.values()
    server.next.take(server.updater)
    assert server.model.qk.untyped_storage().data_ptr() == copy.data_ptr()
    assert server.next._copies == {}, "the second copy ends with the push"


def test_a_push_that_ended_early_leaves_nothing_behind(server: Server) -> None:
    server.load(adapters("q", "k", seed=1))
    server.wait(1)
    pushed = adapters("q", "k", seed=2)
    server.load(pushed)
    server.next.take(server.updater)
    assert torch.equal(server.model.qk, loaded_at_once(pushed, server.folder)["qk"])


def test_a_load_that_fails_is_refused_in_the_pause(server: Server) -> None:
    before = server.model.values()
    pushed = adapters("q")
    server.load({name.replace("q", "unknown"): tensor for name, tensor in pushed.items()})
    server.wait(1)
    with pytest.raises(ValueError, match="has no unknown.weight"):
        server.next.take(server.updater)
    assert server.model.values() == before


def test_other_requests_to_join_are_passed_on(server: Server) -> None:
    group = ("127.0.0.1", 1, 1, 2, "areal_lite_1", "gloo")
    assert server.next.receive(lambda *given: given[1:], server.updater, *group) == group
