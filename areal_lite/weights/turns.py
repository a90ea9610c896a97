"""Trainer and servers that use the same GPUs in turn: `server.args.enable_memory_saver=true`.

    servers generate -> they park -> training step -> a push wakes them -> servers generate

* A parked server is paused and has given back the memory of its weights and its KV cache. Its
  running requests wait, and their tokens so far are computed again when it wakes.
* A push wakes it: first its memory for weights, which the push fills, then its KV cache. By then
  the trainer has left the GPUs (`trainer.offload`), except for its weights.
* gpus.lock keeps the turns apart. The trainer has it alone. Servers that start share it until they
  are announced. The kernel releases it when a process ends.
* A server that does not park keeps its memory: it is marked unhealthy, and the turn begins when its
  process has ended.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch.distributed as dist

from areal_lite.config import TrainConfig
from areal_lite.megatron.parallel import init_distributed
from areal_lite.run_dir.resume import open_gpus_lock
from areal_lite.servers.blocking import post_each
from areal_lite.servers.registry import announced_servers, mark_unhealthy
from areal_lite.system import heartbeat
from areal_lite.system.files import try_lock
from areal_lite.system.processes import steady_time
from areal_lite.trajectory import InterruptMode

log = logging.getLogger(__name__)

# SGLang's names of the memory that a server gives back.
WEIGHTS, KV_CACHE = "weights", "kv_cache"
_POLL_INTERVAL_S = 0.1


class Turns:
    """The trainer's turns on the GPUs of its servers. Every rank makes the same calls.

    `parked_at`: when the servers parked that wait for a push, in wall-clock seconds, or 0.
    """

    def __init__(self, config: TrainConfig, run_dir: Path):
        self._config = config
        self._run_dir = run_dir
        self.parked_at = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep servers off the GPUs inside the block, on every rank, if they are shared at all."""
        if not self._config.server.takes_turns:
            yield
            return
        init_distributed(self._config.trainer, self._config.seed)
        with open_gpus_lock(self._run_dir) as lock:
            if dist.get_rank() == 0:
                what = "waiting for servers that start on the trainer's GPUs"
                _wait(lambda: try_lock(lock, fcntl.LOCK_EX), what)
                self._park()
            dist.barrier()
            yield
            dist.barrier()  # every rank has left the GPUs

    def _park(self) -> None:
        self.parked_at = steady_time()
        sync, servers = self._config.sync, announced_servers(self._run_dir)
        pause = {"mode": InterruptMode.RETRACT}
        errors = post_each(servers, "/pause_generation", pause, sync.health_timeout_s)
        failed = [error.server for error in errors]
        paused = [server for server in servers if server not in failed]
        memory = {"tags": [KV_CACHE, WEIGHTS]}
        errors += post_each(paused, "/release_memory_occupation", memory, sync.timeout_s)
        for error in errors:
            log.warning("%s does not park, and is replaced: %s", error.server, error)
            mark_unhealthy(self._run_dir, error.server, str(error))
        for error in errors:
            what = f"waiting for the end of {error.server.name}, which does not leave its GPUs"
            _wait(lambda pid=error.server.pid: not psutil.pid_exists(pid), what)


def _wait(done: Callable[[], bool], phase: str) -> None:
    """Wait until `done`, and say so where it takes time."""
    if done():
        return
    heartbeat.enter(phase)
    log.info("%s", phase)
    while not done():
        heartbeat.beat()
        time.sleep(_POLL_INTERVAL_S)
