"""Pushes to real servers, mostly through shared memory: exact weights, refusals, a lost server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from areal_lite.config import ServerConfig, TrainConfig
from areal_lite.controller.protocol import PushTargets
from areal_lite.cpu.memory.staged import ACTIVATE, CHECK, DATA_OFFSET
from areal_lite.cpu.memory.transport import MemoryTransport
from areal_lite.data.model_folder import UNTRAINED
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.servers.blocking import post, start_post
from areal_lite.servers.client import ServerRefused, SGLangClient
from areal_lite.servers.registry import ServerInfo
from areal_lite.sglang_plugins import ENV_READBACK
from areal_lite.system.network import free_port
from areal_lite.weights.push import WeightPusher
from areal_lite.weights.recipients import PushReport
from benchmarks.seams import PUSHES, REQUESTS, generate_across_pushes, save_models, wrong_tags

HOST = "127.0.0.1"
FROM_DISK = "/update_weights_from_disk"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@contextmanager
def running(
    model: Path, folder: Path, environment: dict[str, str], *names: str, args: dict | None = None
):
    servers = [
        ServerProcess(
            ServerConfig(args=args or {}),
            str(model),
            name=name,
            port=free_port(),
            seed=1,
            log_path=folder / f"{name}.log",
            environment=environment | {ENV_READBACK: "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for name in names
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            asyncio.run(server.wait_ready())
        yield [server.info for server in servers]
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def server(models, current_entry_points, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with running(models[0], folder, current_entry_points, "one") as (info,):
        yield info


def pusher_of(model: Path, servers: list[ServerInfo], transport: str) -> WeightPusher:
    """Return the real pusher of a checkpoint, to exactly these servers."""
    weights = load_file(model / "model.safetensors").items()
    trained = [(name, tensor) for name, tensor in weights if not name.endswith(UNTRAINED)]
    stream = SimpleNamespace(buckets=lambda size: iter([trained]))
    controller = SimpleNamespace(
        begin_push=lambda version: PushTargets(servers), pushed=lambda version, failed: None
    )
    config = TrainConfig(model=str(model))
    config.sync.transport = transport
    config.sync.verify, config.sync.timeout_s = True, 60
    return WeightPusher(stream, torch.device("cpu"), controller, config, model)


def push(model: Path, servers: list[ServerInfo], transport: str, version: int) -> PushReport:
    pusher = pusher_of(model, servers, transport)
    try:
        return pusher.push_all(version)
    finally:
        pusher.close()


def parameters(server: ServerInfo) -> dict[str, list]:
    """Return every parameter of the server as lists of numbers."""
    layers = [
        f"model.layers.{layer}.{part}.weight"
        for layer in range(2)
        for part in (
            "input_layernorm", "self_attn.qkv_proj", "self_attn.q_norm", "self_attn.k_norm",
            "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_up_proj", "mlp.down_proj",
        )
    ]  # fmt: skip
    names = ["model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"]
    read = {}
    for name in names:  # the answers are larger than the project's own client takes
        body = json.dumps({"name": name, "truncate_size": 1000}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/get_weights_by_name", body, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            read[name] = json.load(response)
        assert read[name] is not None
    return read


def version_of(server: ServerInfo) -> int:
    async def ask() -> int:
        async with SGLangClient(60) as client:
            return await client.weight_version(server)

    return asyncio.run(ask())


def test_the_weights_are_those_that_a_broadcast_brings(trainer, server, models):
    a, b = models
    assert push(b, [server], "distributed", 1).failed == []
    broadcast = parameters(server)
    assert push(a, [server], "distributed", 2).failed == []
    assert parameters(server) != broadcast
    for version in (3, 4):  # the second one uses the plan of the first
        report = push(b, [server], "memory", version)
        assert report.failed == [] and report.verified and version_of(server) == version
        assert parameters(server) == broadcast
        assert push(a, [server], "memory", 10 + version).failed == []


def test_changes_bring_the_weights_that_a_broadcast_brings(trainer, server, models):
    bucket = load_file(models[0] / "model.safetensors")
    trained = {name: tensor for name, tensor in bucket.items() if not name.endswith(UNTRAINED)}
    stream = SimpleNamespace(buckets=lambda size: iter([list(trained.items())]))
    pushers = {kind: pusher_of(models[0], [server], kind) for kind in ("delta", "distributed")}
    mebibytes = sum(tensor.nbytes for tensor in trained.values()) / 2**20
    for version in range(31, 35):
        for tensor in trained.values():
            flat = tensor.view(-1)
            flat[version::100] = torch.randn(len(flat[version::100]))
        found = {}
        for kind, pusher in pushers.items():
            pusher._weights = stream
            report = pusher.push_all(version)
            assert report.failed == [] and report.verified
            found[kind] = parameters(server)
            changes = kind == "delta" and version > 31
            assert report.megabytes <= 0.1 * mebibytes if changes else report.megabytes == mebibytes
        assert found["delta"] == found["distributed"]
    for pusher in pushers.values():
        pusher.close()
    assert push(models[0], [server], "distributed", 36).failed == []  # even versions are this model


def test_each_token_is_tagged_with_the_version_that_sampled_it(server, models):
    memory = MemoryTransport()

    def push_between_steps(server: ServerInfo, model: Path, version: int) -> None:
        weights = load_file(model / "model.safetensors")
        staged = memory.write([list(weights.items())], version)
        post(server, FROM_DISK, staged.request(CHECK), 60)
        post(server, FROM_DISK, staged.request(ACTIVATE) | {"flush_cache": False}, 60)

    versions = range(21, 21 + PUSHES)
    answers = generate_across_pushes(server, models, push_between_steps, versions, pause=False)
    wrong, seams = wrong_tags(models, answers)
    assert seams >= REQUESTS and wrong == 0
    memory.close([])


def flip_a_byte(descriptor: int) -> None:
    byte = os.pread(descriptor, 1, DATA_OFFSET + 100)[0]
    os.pwrite(descriptor, bytes([byte ^ 4]), DATA_OFFSET + 100)


def cut_the_end(descriptor: int) -> None:
    os.ftruncate(descriptor, os.fstat(descriptor).st_size - 100)


REFUSED: dict[str, tuple[Callable[[int], None] | None, str | None, str]] = {
    "corrupt byte": (flip_a_byte, None, "does not have its checksum"),
    "short file": (cut_the_end, None, "its table is elsewhere"),
    "half written": (lambda file: os.pwrite(file, bytes(64), 0), None, "not whole"),
    "missing tensor": (None, "model.layers.1.self_attn.k_proj.weight", "parts of model.layers.1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_version_leaves_the_old_one_whole_and_serving(server, models, case):
    damage, left_out, message = REFUSED[case]
    memory = MemoryTransport()
    weights = load_file(models[1] / "model.safetensors")
    weights.pop(left_out, None)
    before, version = parameters(server), version_of(server)
    staged = memory.write([list(weights.items())], version + 1)
    if damage:
        damage(memory._descriptor)
    request = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    generating = start_post(server, "/generate", request, 60)
    with pytest.raises(ServerRefused, match=message):
        post(server, FROM_DISK, staged.request(CHECK), 60)
        post(server, FROM_DISK, staged.request(ACTIVATE) | {"flush_cache": False}, 60)
    meta = generating.result()["meta_info"]
    assert meta["completion_tokens"] == 400 and meta["weight_version"] == str(version)
    assert parameters(server) == before and version_of(server) == version
    memory.close([])


def test_a_version_that_was_not_checked_is_refused(server, models):
    memory = MemoryTransport()
    weights = list(load_file(models[1] / "model.safetensors").items())
    before, version = parameters(server), version_of(server)
    staged = memory.write([weights], version + 2)
    with pytest.raises(ServerRefused, match="was not checked here"):
        post(server, FROM_DISK, staged.request(ACTIVATE), 60)
    with pytest.raises(ServerRefused, match=f'{version + 2} of the weights, not 1"'):
        lie = staged.request(CHECK) | {"weight_version": "1"}
        post(server, FROM_DISK, lie, 60)
    assert parameters(server) == before and version_of(server) == version
    memory.close([])


@pytest.mark.slow  # test_push_points.py has stand-ins that die
def test_a_server_that_dies_in_an_activation_leaves_the_others_their_version(
    models, current_entry_points, tmp_path, monkeypatch
):
    with running(models[0], tmp_path, current_entry_points, "lives", "dies") as (lives, dies):
        assert push(models[1], [lives, dies], "memory", 1).failed == []
        both = parameters(lives)
        assert parameters(dies) == both
        pusher = pusher_of(models[0], [lives, dies], "memory")
        write = pusher._transport.write

        def kill_when_the_other_is_done() -> None:
            while version_of(lives) != 2:
                time.sleep(0.01)
            os.killpg(dies.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_when_the_other_is_done)

        def stop_one(*weights):
            os.killpg(dies.pid, signal.SIGSTOP)  # it gets the request and cannot answer
            killer.start()
            return write(*weights)

        monkeypatch.setattr(pusher._transport, "write", stop_one)
        report = pusher.push_all(2)
        killer.join()
        pusher.close()
        assert report.failed == ["dies"] and version_of(lives) == 2
        assert parameters(lives) != both
