"""Servers and trainer that take turns: a real server parks, and a run loses each of its roles."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.run_dir.resume import open_gpus_lock
from areal_lite.servers.blocking import post, start_post
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.files import try_lock
from areal_lite.system.network import free_port
from tests.integration.controller_run import wrong_with
from tests.integration.test_restarts import CONTROLLER, TRAINER, steps_of, strike
from tests.integration.test_train import COMMON, ROOT, Run, model, processes_of  # noqa: F401

CACHE_TOKENS = 400_000
CACHE_BYTES = CACHE_TOKENS * 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, numbers, bytes
LONG = {"max_new_tokens": 1500, "temperature": 0.0, "ignore_eos": True}


@contextmanager
def saver(checkpoint: str, log: Path) -> Iterator[tuple[ServerInfo, psutil.Process]]:
    """Run a server that can park; yield its address and the process that has its memory."""
    args = {"enable_memory_saver": True, "max_total_tokens": CACHE_TOKENS}
    config = ServerConfig(args=args)
    server = ServerProcess(config, checkpoint, name="s", port=free_port(), seed=1, log_path=log)
    try:
        server.start()
        asyncio.run(server.wait_ready())
        children = psutil.Process(server.info.pid).children(recursive=True)
        yield server.info, max(children, key=lambda child: child.memory_info().vms)
    finally:
        server.stop()


def ask(server: ServerInfo, path: str, **body: object) -> dict:
    return post(server, path, body, 60)


def large_memory(process: psutil.Process) -> int:
    """Return the bytes that a process may write in pieces of the size of a layer's cache."""
    lines = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    spans = [span.split("-") for span, rights, *_ in lines if rights.startswith("rw")]
    sizes = [int(end, 16) - int(start, 16) for start, end in spans]
    return sum(size for size in sizes if size >= CACHE_BYTES // 4)


def tokens_of(answer: dict) -> list[int]:
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


@pytest.mark.timeout(180)
def test_a_parked_server_has_no_memory_and_its_requests_wait(tiny_model, tmp_path) -> None:
    with saver(tiny_model, tmp_path / "log") as (server, process):
        request = {"input_ids": [5, 6, 7], "sampling_params": LONG, "return_logprob": True}
        before = tokens_of(ask(server, "/generate", **request))
        running = start_post(server, "/generate", request, 60)
        time.sleep(0.2)
        assert not running.done(), "there is something to interrupt"
        taken = large_memory(process)
        parks = "/release_memory_occupation"
        ask(server, "/pause_generation", mode="retract")
        for _ in range(2):  # a trainer that begins again asks again
            ask(server, parks, tags=["kv_cache", "weights"])
        assert taken - large_memory(process) >= CACHE_BYTES
        time.sleep(0.2)
        used = process.cpu_times()
        time.sleep(1.0)
        now = process.cpu_times()
        assert now.user + now.system - used.user - used.system < 0.5, "the core is the trainer's"
        # A controller that begins again does so. With such weights the server would die.
        ask(server, "/continue_generation")
        time.sleep(0.5)
        assert not running.done() and process.is_running()

        ask(server, "/pause_generation", mode="retract")
        wakes = "/resume_memory_occupation"
        ask(server, wakes, tags=["weights"])
        ask(server, "/update_weights_from_disk", model_path=tiny_model, flush_cache=True)
        ask(server, "/continue_generation")
        assert not running.done(), "it has no KV cache yet"
        for _ in range(2):
            ask(server, wakes, tags=["kv_cache"])
        assert large_memory(process) >= taken
        ask(server, "/continue_generation")
        assert tokens_of(running.result(60)) == before
        assert tokens_of(ask(server, "/generate", **request)) == before


def wait_for(condition: Callable[[], bool], is_over: Callable[[], bool]) -> None:
    while not condition():
        assert not is_over()
        time.sleep(0.002)


def in_turn(folder: Path) -> bool:
    """Return whether the trainer has the GPUs."""
    with open_gpus_lock(folder) as lock:
        return not try_lock(lock, fcntl.LOCK_SH)


def pid_of_server(folder: Path) -> int:
    return json.loads((folder / "servers" / "server-0.json").read_text())["pid"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_in_turns_survives_the_loss_of_any_role(model, tmp_path) -> None:  # noqa: F811
    """Kill each role in a turn of the trainer, the trainer outside one, and stop a server."""
    folder, steps = tmp_path / "run", 16
    settings = [
        *COMMON,
        "+experiment=in_turn",
        f"sync.disk_path={tmp_path / 'weights'}",
        "server.args.max_total_tokens=100000",
        f"trainer.steps={steps}",
        "trainer.save_every=1",
        "sync.timeout_s=20",
        "restart.hang_timeout_s=120",
    ]
    command = [
        *(sys.executable, "-m", "areal_lite", "train"),
        *(f"model={model}", f"run_dir={folder}", *settings),
    ]
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def over() -> bool:
        return process.poll() is not None

    def after(done: int) -> None:
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= done, over)

    def in_next_turn(strikes: Callable[[], object]) -> None:
        wait_for(lambda: in_turn(folder), over)
        strikes()

    try:
        after(2)
        in_next_turn(lambda: os.killpg(pid_of_server(folder), signal.SIGKILL))
        after(5)
        in_next_turn(lambda: strike(folder, TRAINER, signal.SIGKILL))
        after(8)
        in_next_turn(lambda: strike(folder, CONTROLLER, signal.SIGKILL))
        after(11)
        wait_for(lambda: not in_turn(folder), over)
        strike(folder, TRAINER, signal.SIGKILL)
        after(13)
        wait_for(lambda: not in_turn(folder), over)
        os.killpg(pid_of_server(folder), signal.SIGSTOP)
        assert process.wait(300) == 0, (tmp_path / "output").read_text()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    run = Run(folder)
    assert steps_of(folder) == list(range(1, steps + 1)) and wrong_with(folder) == {}
    assert run.summary["trajectories_lost"] == 0 and run.metrics[-1]["verified"] > 0
    differences = [m["logprob_diff_sampled"] for m in run.metrics]
    assert all(d is None or d < 1e-4 for d in differences), "no token is of lost memory"
    assert processes_of(folder) == []
