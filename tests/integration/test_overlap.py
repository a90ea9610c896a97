"""Pushes in place to a server that overlaps scheduling with computing, as servers on GPUs do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from areal_lite.config import ServerConfig, TrainConfig
from areal_lite.cpu.memory.staged import ACTIVATE, CHECK
from areal_lite.cpu.memory.transport import MemoryTransport
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.servers.blocking import post
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.network import free_port
from areal_lite.weights.broadcast import Broadcast, flatten
from benchmarks.seams import (
    PUSHES,
    REQUESTS,
    generate_across_pushes,
    push_disk,
    save_models,
    wrong_tags,
)
from tests.integration.test_sglang_server import ONCE, computed_by_groups


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def overlapping(models, current_entry_points, tmp_path_factory):
    """A server without a GPU that overlaps all the same."""
    server = ServerProcess(
        ServerConfig(args={"disable_overlap_schedule": False}),
        str(models[0]),
        name="overlapping",
        port=free_port(),
        seed=1,
        log_path=tmp_path_factory.mktemp("overlapping") / "server.log",
        environment=current_entry_points | {"GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        server.start()
        asyncio.run(server.wait_ready())
        yield server.info
        log = server.log_path.read_text()
        assert "init custom process group" not in log, "SGLang joined a group without the plugin"
    finally:
        server.stop()


class Broadcasts:
    """Pushes over a weight group, as the trainer's."""

    def __init__(self):
        self._group = Broadcast(TrainConfig(model="m"), "gloo")

    def __call__(self, server: ServerInfo, model: Path, version: int) -> None:
        bucket = flatten(list(load_file(model / "model.safetensors").items()))
        post(server, "/begin_weight_update", {}, 60)
        self._group.send(bucket, [server], version=str(version), flush_cache=False)
        post(server, "/end_weight_update", {}, 60)
        if version % 4 == 0:
            self._group.leave([server])  # the next push makes a new group


class SharedMemory:
    """Pushes through shared memory, as the trainer's."""

    def __init__(self):
        self._memory = MemoryTransport()

    def __call__(self, server: ServerInfo, model: Path, version: int) -> None:
        weights = load_file(model / "model.safetensors")
        staged = self._memory.write([list(weights.items())], version)
        activation = staged.request(ACTIVATE) | {"flush_cache": False}
        for body in (staged.request(CHECK), activation):
            post(server, "/update_weights_from_disk", body, 60)


PUSHERS = {"disk": lambda: push_disk, "distributed": Broadcasts, "memory": SharedMemory}


@pytest.mark.parametrize(
    "transport", [pytest.param("disk", marks=pytest.mark.slow), "distributed", "memory"]
)
def test_each_token_is_tagged_with_the_version_that_sampled_it(
    trainer, overlapping, models, transport
) -> None:
    first = 1 + PUSHES * list(PUSHERS).index(transport)
    versions = range(first, first + PUSHES)
    pause = transport != "memory"  # its activation comes between two steps without a pause
    push = PUSHERS[transport]()
    answers = generate_across_pushes(overlapping, models, push, versions, pause=pause)
    wrong, seams = wrong_tags(models, answers)
    print(f"{wrong} tokens at {seams} seams carry the wrong version")
    assert seams >= REQUESTS and wrong == 0


def test_a_group_computes_its_prompt_once(overlapping):
    """SGLang forms the next batch before it knows the result of the batch with the prompt."""
    assert computed_by_groups(overlapping.url) == ONCE
