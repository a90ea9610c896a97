"""Choices of `sync.transport=auto`."""

import pytest

from areal_lite.config import ServerConfig, SyncConfig, TrainConfig, TrainerConfig
from areal_lite.cpu.memory.transport import can_share_memory
from areal_lite.tools.dry_run import push_lines
from areal_lite.weights import push
from areal_lite.weights.push import choose_transport


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def config(**settings) -> TrainConfig:
    return TrainConfig(model="m", **settings)


def test_servers_without_gpus_take_weights_from_memory():
    assert choose_transport(config()) == "memory"


@pytest.mark.parametrize(
    "settings",
    [
        dict(trainer=TrainerConfig(device="cuda")),
        dict(server=ServerConfig(device="cuda")),
        dict(server=ServerConfig(tensor_parallel=2)),
        dict(server=ServerConfig(host="node", api_key="key")),
    ],
)
def test_other_servers_take_part_in_a_broadcast(settings):
    assert choose_transport(config(**settings)) == "distributed"


def test_a_model_that_computes_from_its_weights_takes_part_in_a_broadcast(tmp_path):
    for kind, transport in (("qwen3", "memory"), ("deepseek_v3", "distributed")):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        assert choose_transport(TrainConfig(model=str(tmp_path))) == transport


def test_an_installation_without_the_plugin_broadcasts(monkeypatch):
    monkeypatch.setattr(push, "load", lambda *_: None)
    assert choose_transport(config()) == "distributed"


def test_a_sandbox_that_hides_memory_of_other_processes_broadcasts(monkeypatch):
    assert can_share_memory()
    monkeypatch.setattr("os.getpid", lambda: 0)  # no process has this number
    assert not can_share_memory() and choose_transport(config()) == "distributed"


@pytest.mark.parametrize("chosen", ["distributed", "adapters", "delta", "memory", "disk"])
def test_what_is_set_is_used(chosen):
    assert choose_transport(config(sync=SyncConfig(transport=chosen))) == chosen


def test_the_plan_says_which_transport_is_used():
    from transformers import Qwen3Config

    lines = push_lines(config(), Qwen3Config(num_hidden_layers=1), 4)
    assert "(sync.transport=auto, which is memory here)" in lines[0]
    assert lines[-1].endswith("of the trainer's memory, which the servers share")
    lines = push_lines(
        config(sync=SyncConfig(transport="disk")), Qwen3Config(num_hidden_layers=1), 4
    )
    assert "(sync.transport=disk)" in lines[0] and "memory" not in lines[-1]
