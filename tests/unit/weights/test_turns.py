"""The trainer's turns on GPUs that servers use, too: their order, their lock, and bad servers."""

import fcntl
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from areal_lite.config import ServerConfig, TrainConfig
from areal_lite.run_dir.paths import GPUS_LOCK_FILE
from areal_lite.run_dir.resume import open_gpus_lock
from areal_lite.servers.registry import announce_server, unhealthy_reason
from areal_lite.system.files import try_lock
from areal_lite.weights import turns as module
from areal_lite.weights.turns import Turns
from tests.unit.weights.test_push import Answers, answers  # noqa: F401

PAUSE, RELEASE = "/pause_generation", "/release_memory_occupation"


@pytest.fixture(autouse=True)
def rank(monkeypatch):
    monkeypatch.setattr(module, "init_distributed", lambda *_: None)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def turns_in(folder: Path, **args: object) -> Turns:
    config = TrainConfig(model="m", run_dir=str(folder), server=ServerConfig(args=args))
    return Turns(config, folder)


def is_free(folder: Path) -> bool:
    """Return whether a server could start now."""
    with open_gpus_lock(folder) as lock:
        return try_lock(lock, fcntl.LOCK_SH)


def test_servers_are_parked_and_none_starts_in_a_turn(answers, tmp_path):  # noqa: F811
    server: Answers = answers("server-0")
    announce_server(tmp_path, server.info)
    turns, before = turns_in(tmp_path, enable_memory_saver=True), time.time()
    with turns.turn():
        assert list(server.calls) == [PAUSE, RELEASE] and not is_free(tmp_path)
    assert server.bodies[PAUSE] == {"mode": "retract"}
    assert server.bodies[RELEASE] == {"tags": ["kv_cache", "weights"]}
    assert is_free(tmp_path) and before <= turns.parked_at <= time.time()


def test_a_turn_waits_for_a_server_that_starts(answers, tmp_path):  # noqa: F811
    starting = open_gpus_lock(tmp_path)
    assert try_lock(starting, fcntl.LOCK_SH)
    server: Answers = answers("server-0")

    def start() -> None:
        time.sleep(0.3)
        announce_server(tmp_path, server.info)
        starting.close()

    thread = threading.Thread(target=start)
    thread.start()
    with turns_in(tmp_path, enable_memory_saver=True).turn():
        assert server.calls[RELEASE] == 1, "the server that started meanwhile parks, too"
    thread.join()


def test_a_turn_ends_with_an_error(tmp_path):
    with pytest.raises(FloatingPointError), turns_in(tmp_path, enable_memory_saver=True).turn():
        raise FloatingPointError
    assert is_free(tmp_path)


@pytest.mark.parametrize("refused", [PAUSE, RELEASE])
def test_a_server_that_does_not_park_is_replaced_before_the_turn(
    answers,  # noqa: F811
    tmp_path,
    refused,
):
    process = subprocess.Popen(["sleep", "60"])
    bad: Answers = answers("bad", refused)
    info = replace(bad.info, pid=process.pid)
    good: Answers = answers("good")
    for each in (info, good.info):
        announce_server(tmp_path, each)

    def supervise() -> None:
        while unhealthy_reason(tmp_path, info) is None:
            time.sleep(0.01)
        time.sleep(0.3)
        process.kill()
        process.wait()

    thread = threading.Thread(target=supervise)
    thread.start()
    try:
        with turns_in(tmp_path, enable_memory_saver=True).turn():
            assert process.poll() is not None, "its memory is free"
    finally:
        process.kill()
        thread.join()
    assert "refused" in str(unhealthy_reason(tmp_path, info))
    assert unhealthy_reason(tmp_path, good.info) is None and good.calls[RELEASE] == 1


def test_servers_with_gpus_of_their_own_go_on(answers, tmp_path):  # noqa: F811
    server: Answers = answers("server-0")
    announce_server(tmp_path, server.info)
    turns = turns_in(tmp_path)
    with turns.turn():
        assert not server.calls and not (tmp_path / GPUS_LOCK_FILE).exists()
    assert turns.parked_at == 0
