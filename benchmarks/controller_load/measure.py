"""Measure a real controller process: CPU time, memory, event-loop lag and replies."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import uvloop

from areal_lite.controller.batches import LoopLag
from areal_lite.controller.protocol import ControllerClient
from areal_lite.servers.blocking import post
from areal_lite.system.processes import dying_with_me
from benchmarks.controller_load.load import GROUP_SIZE, Load


class IdleLag(threading.Thread):
    """The lag of an idle event loop in this process: the share of the machine itself."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.lag = LoopLag()
        self.start()

    def run(self) -> None:
        uvloop.run(self.lag.watch())


class Trainer:
    """The trainer's side of the protocol, without training."""

    def __init__(self, run_dir: Path) -> None:
        self.client = ControllerClient(run_dir, 120)
        self.step = 0

    def pull(self) -> dict:
        """Pull the next batch, and return what the controller tells about it."""
        batch, info = self.client.batch(self.step, 0, 1)
        return info | {"sampled_tokens": int(np.count_nonzero(batch.loss_mask))}

    def push(self) -> None:
        """End the step: push the next version to every server."""
        self.step += 1
        for server in self.client.begin_push(self.step).servers:
            body = {"model_path": "-", "weight_version": str(self.step)}
            post(server, "/update_weights_from_disk", body, 30)
        self.client.pushed(self.step)


def measure(run_dir: Path, load: Load, steps: int) -> dict:
    """Measure `steps` steps of a new controller, after those that fill its buffers."""
    with open(run_dir / "controller.log", "wb") as errors:
        controller = subprocess.Popen(
            [sys.executable, "-m", "areal_lite.controller.service", str(run_dir)],
            env=os.environ | dying_with_me(),
            stderr=errors,
        )
    trainer = Trainer(run_dir)
    try:
        for _ in range(load.max_staleness + 1 + load.in_flight // (GROUP_SIZE * load.batch_groups)):
            trainer.pull()
            trainer.push()
        found = _steps(trainer, psutil.Process(controller.pid), steps)
        found |= _ready_batch(trainer, 2 * found["seconds"] / steps)
        found["totals"] = trainer.client.finish()
        return found
    finally:
        trainer.client.close()
        controller.terminate()
        controller.wait()


def _steps(trainer: Trainer, process: psutil.Process, steps: int) -> dict:
    """Measure from the reply of one batch to that of the batch `steps` later."""
    idle, infos, memory = IdleLag(), [], []
    trainer.pull()
    trainer.push()
    idle.lag.take_p99()
    started, cpu = time.perf_counter(), _cpu_s(process)
    for _ in range(steps):
        infos.append(trainer.pull())
        memory.append(process.memory_info().rss / 2**20)
        trainer.push()
    seconds, cpu = time.perf_counter() - started, _cpu_s(process) - cpu
    done = sum(info["trajectories"] for info in infos)
    tokens = sum(info["sampled_tokens"] for info in infos)
    lags = sorted(info["loop_lag_p99_s"] for info in infos)
    quarter = max(1, steps // 4)
    return {
        "trajectories": done,
        "tokens": tokens,
        "seconds": seconds,
        "per_s": done / seconds,
        "tokens_per_s": tokens / seconds,
        "cpu_s_per_1000": 1000 * cpu / done,
        "cpu_s_per_million_tokens": 1e6 * cpu / tokens,
        "core_share": cpu / seconds,
        "in_flight_mean": float(np.mean([info["in_flight"] for info in infos])),
        "loop_lag_p99_s": lags[len(lags) // 2],
        "loop_lag_p99_s_worst_step": lags[-1],
        "idle_loop_lag_p99_s": idle.lag.take_p99(),
        "memory_mib_first_quarter": max(memory[:quarter]),
        "memory_mib_last_quarter": max(memory[-quarter:]),
    }


def _ready_batch(trainer: Trainer, wait_s: float) -> dict[str, float]:
    """Measure from a request to its reply, where the batch is complete after `wait_s`."""
    time.sleep(wait_s)
    started = time.perf_counter()
    info = trainer.pull()
    return {
        "ready_batch_s": time.perf_counter() - started,
        "ready_batch_wait_s": info["wait_s"],
        "ready_batch_tokens": info["sampled_tokens"],
    }


def _cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])
