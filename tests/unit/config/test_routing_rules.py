"""Routing replay is refused where it could not work, before anything starts."""

import json
from pathlib import Path

import pytest

from areal_lite.config import AlgoConfig, ServerConfig, TrainConfig, TrainerConfig, find_command
from areal_lite.config.rules import check_rules
from areal_lite.data.model_folder import expert_layout
from areal_lite.launch.preflight import check_config
from areal_lite.launch.server_pool import train_pool
from areal_lite.routes import ExpertLayout

REPLAY = AlgoConfig(routing_replay=True)


def model(folder: Path, **described) -> str:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(described))
    return str(folder)


def test_a_dense_model(tmp_path: Path) -> None:
    dense = model(tmp_path, model_type="qwen3", num_hidden_layers=2)
    config = TrainConfig(model=dense, run_dir=str(tmp_path / "run"), algo=REPLAY)
    config.data.source = "addition"
    config.reward.function = "areal_lite_quickstart.addition:addition_reward"
    with pytest.raises(ValueError, match="routing_replay=true: model=.* has no experts.* to false"):
        check_config(find_command("train"), config)
    model(tmp_path, num_experts=128, num_hidden_layers=48, num_experts_per_tok=8)
    check_config(find_command("train"), config)
    assert expert_layout(tmp_path) == ExpertLayout(layers=48, experts=128, top_k=8)
    model(tmp_path, num_local_experts=128, num_hidden_layers=48, num_experts_per_tok=8)
    layout = expert_layout(tmp_path)
    assert layout == ExpertLayout(layers=48, experts=128, top_k=8)
    assert layout.choices * layout.dtype.itemsize == 384
    glm = dict(n_routed_experts=160, num_hidden_layers=92, first_k_dense_replace=3)
    model(tmp_path, **glm, num_experts_per_tok=8)
    assert expert_layout(tmp_path) == ExpertLayout(layers=89, experts=160, top_k=8, dense=3)


@pytest.mark.parametrize(("experts", "size"), [(8, 1), (255, 1), (256, 2), (512, 2)])
def test_the_largest_number_of_a_dtype_is_no_expert(experts: int, size: int) -> None:
    layout = ExpertLayout(layers=1, experts=experts, top_k=1)
    assert layout.dtype.itemsize == size and experts <= 2 ** (8 * size) - 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"trainer": TrainerConfig(recompute="full", pipeline_parallel=2)},
            "recompute=full with trainer.pipeline_parallel=2: .* use recompute=selective",
        ),
        (
            {"server": ServerConfig(args={"enable_return_routed_experts": False})},
            "server.args.enable_return_routed_experts=false: .* remove it",
        ),
    ],
)
def test_settings_that_contradict_it(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rules(TrainConfig(model="m", algo=REPLAY, **settings))
    check_rules(TrainConfig(model="m", **settings))


@pytest.mark.parametrize("replay", [True, False])
def test_the_servers_of_the_run_return_routes(tmp_path: Path, replay: bool) -> None:
    config = TrainConfig(model="m", algo=AlgoConfig(routing_replay=replay))
    config.server.device = "cpu"
    (make,) = train_pool(config, tmp_path, {0: []}).make.values()
    assert ("--enable-return-routed-experts" in make().argv) == replay
