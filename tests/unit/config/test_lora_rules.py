"""Adapters that cannot work are refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal_lite.config import (
    DataConfig,
    LoraConfig,
    RewardConfig,
    TrainConfig,
    TrainerConfig,
    check_fields,
    find_command,
)
from areal_lite.config.rules import check_trainer
from areal_lite.launch.preflight import check_config

ADDITION: dict[str, Any] = {
    "data": DataConfig(source="addition"),
    "reward": RewardConfig("areal_lite_quickstart.addition:addition_reward"),
}


@pytest.mark.parametrize("targets", [[], ["qkv", "qkv"]])
def test_targets_are_named_once(targets: list[str]) -> None:
    trainer = TrainerConfig(lora=LoraConfig(rank=8, targets=targets))
    with pytest.raises(
        ValueError, match="sft.trainer.lora.targets=.* one or more layers, each once"
    ):
        check_trainer(trainer, "sft.trainer")
    check_trainer(TrainerConfig(lora=LoraConfig(targets=targets)))  # there are no adapters


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=-1), "trainer.lora.rank=-1: must be at least 0"),
        (LoraConfig(rank=8, alpha=0.0), "trainer.lora.alpha=0.0: must be at least 1e-06"),
        (LoraConfig(rank=8, targets=["q_proj"]), "choose one of qkv, proj, fc1, fc2"),
    ],
)
def test_values_outside_their_bounds(lora: LoraConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fields(TrainConfig(model="m", trainer=TrainerConfig(lora=lora)))


@pytest.mark.parametrize("command", ["train", "sft"])
def test_experts_take_no_adapters(tmp_path: Path, command: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    described = {"model_type": "qwen3_moe", "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(described))
    where = {"model": str(tmp_path), "run_dir": str(tmp_path / "run")}
    where |= {"out": str(tmp_path / "out")} if command == "sft" else ADDITION
    config = find_command(command).schema(**where, trainer=TrainerConfig(lora=LoraConfig(rank=8)))
    with pytest.raises(ValueError, match=r"so set trainer.lora.targets=\[qkv,proj\]"):
        check_config(find_command(command), config)
    config.trainer.lora.targets = ["qkv", "proj"]
    check_config(find_command(command), config)


def test_muon_takes_no_adapters() -> None:
    trainer = TrainerConfig(optimizer="muon", lora=LoraConfig(rank=8))
    with pytest.raises(ValueError, match="trainer.optimizer=muon takes no adapters: set trainer.l"):
        check_trainer(trainer)
    check_trainer(TrainerConfig(optimizer="muon"))
