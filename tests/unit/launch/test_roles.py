"""The environment of a trainer rank: a rank with a GPU gets nothing that is for one without."""

import json
from pathlib import Path

import pytest

from areal_lite.config import TrainerConfig
from areal_lite.launch.roles import Roles

# Variables that slow a GPU down or bound its caches.
WITHOUT_GPU = {
    "TORCHDYNAMO_DISABLE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
    "THP_MEM_ALLOC_ENABLE",
}


def environment_of_a_rank(folder: Path, gpus: list[str]) -> dict[str, str]:
    with Roles(folder) as roles:
        ranks = roles.start_ranks("tests.unit.launch.environment", TrainerConfig(), gpus)
        roles.wait(ranks)
        return json.loads(ranks[0].output())


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch) -> None:
    for name in WITHOUT_GPU | {"CUDA_DEVICE_MAX_CONNECTIONS"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def test_a_rank_with_a_gpu(tmp_path: Path) -> None:
    environment = environment_of_a_rank(tmp_path, ["3"])
    assert not WITHOUT_GPU & environment.keys()
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_rank_without_a_gpu(tmp_path: Path) -> None:
    environment = environment_of_a_rank(tmp_path, [])
    assert environment.keys() >= WITHOUT_GPU
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment
