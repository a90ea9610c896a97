"""Stock SGLang servers, and the servers of a run, supervised on a thread of their own.

* A server is `python -m areal_lite.launch.serve` with SGLang's own flags, in a process group of its
  own. It serves token ids only. In a run it is stale until the trainer's first push, even of
  version 0. Nothing of it outlives `ServerProcess.stop`, or the process that started it.
* docs/servers.md (Servers that come and go) says when it is announced, killed and started again. A
  server that never came up ends the whole pool: a restart would not mend its configuration.

As a module it runs servers of a run that was started elsewhere (prepare.py), on the GPUs that this
process sees. With `until-end` they end when the trainer has ended well, and free their GPUs.
"""

import argparse
import asyncio
import fcntl
import json
import logging
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from areal_lite.config import RestartConfig, ServerConfig, TrainConfig, load_config
from areal_lite.config.fields import WEEK_S
from areal_lite.extensions import cpu_device
from areal_lite.launch.roles import RoleFailed, interruptible, signal_group, start_logged
from areal_lite.run_dir.controller_status import TrainerPhase, read_status
from areal_lite.run_dir.paths import LOGS_DIR, STORE_FILE, TOTALS_FILE
from areal_lite.run_dir.resume import open_gpus_lock
from areal_lite.servers import registry
from areal_lite.servers.client import ServerError, SGLangClient
from areal_lite.sglang_plugins import ENV_API_KEY, ENV_DEVICE, ENV_NAME, ENV_READBACK, ENV_STORE
from areal_lite.system.files import append_log, try_lock
from areal_lite.system.gpus import (
    CUDA_CONTEXT,
    GpuMemory,
    check_cuda,
    divide_gpus,
    gpu_environment,
    gpu_memory,
    nccl_environment,
    resolve_device,
    visible_gpus,
)
from areal_lite.system.network import LOOPBACK, free_port, listen_address
from areal_lite.system.processes import back_off_s, die_with_parent, ending, tail, visible

LOG = "servers.log"
_HEALTH_TIMEOUT_S = 5.0
_SGLANG_ENVIRONMENT = {
    # With this on, /health generates a token: a server that a push has paused would look dead.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    # With these on, a server whose scheduler or detokenizer has died would stop answering, and end
    # 65 seconds later: it waits for dumps.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
    # The client closes idle connections. A server that stalls for longer than its own limit (5 s)
    # would close one on which a request waits: uvloop looks at timers before sockets.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "86400",
}
_MOST_GRAPHS = 512  # each captured request takes some MiB of a GPU
_POLL_INTERVAL_S = 0.2
_GRACE_S = 3.0
# The controller looks for announcements twice a second, and its status has the trainer's phase.
_NOTICE_S = 3.0
# A server that was ready for so long has its restarts counted anew, or starts again at once.
_STEADY_S, _WORKED_S = 3600.0, 30.0


def server_command(
    config: ServerConfig, model: str, port: int, seed: int
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a server, and what it needs in its environment."""
    device = resolve_device(config.device)
    flags: dict[str, Any] = {
        "model_path": model,
        "host": config.host,
        "port": port,
        "random_seed": seed,
        "tensor_parallel_size": config.tensor_parallel,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "weight_version": "0",
        "skip_tokenizer_init": True,
        "log_level_http": "warning",
        "enable_deterministic_inference": config.deterministic,
        # A request makes many Python objects, and the garbage collector runs after every 700 of
        # them by default. That takes a tenth of the speed at 384 requests without a GPU.
        "gc_threshold": (100_000, 20, 50),
    }
    environment = _SGLANG_ENVIRONMENT | ({ENV_API_KEY: config.api_key} if config.api_key else {})
    if device == "cpu":
        flags |= cpu_device().server_flags()
        environment |= cpu_device().server_environment() | {ENV_DEVICE: device}
    else:
        if config.max_running_requests:
            # SGLang would capture CUDA graphs of at most 256 requests (512 with tensor parallelism
            # of 4 or more). It decodes larger batches without, which takes several times as long.
            flags["cuda_graph_max_bs_decode"] = min(config.max_running_requests, _MOST_GRAPHS)
        environment |= nccl_environment()
    arguments = _arguments(flags | dict(config.args))
    return [sys.executable, "-m", "areal_lite.launch.serve", *arguments], environment


def _arguments(flags: dict[str, Any]) -> list[str]:
    """Write flags: {tp_size: 8, sleep_on_idle: True, x: None} as --tp-size 8 --sleep-on-idle.

    A mapping is JSON, as in --json-model-override-args.
    """
    argv: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
        argv += [json.dumps(one) if isinstance(one, dict) else str(one) for one in values]
    return argv


@dataclass(eq=False, repr=False)
class ServerProcess:
    """One server: `start`, `await wait_ready()`, `stop`."""

    config: ServerConfig
    model: str  # the folder of its checkpoint
    _: KW_ONLY
    name: str  # in the registry
    port: int
    seed: int
    log_path: Path
    environment: dict[str, str] = field(default_factory=dict)  # besides what every server needs

    def __post_init__(self) -> None:
        self.argv, needed = server_command(self.config, self.model, self.port, self.seed)
        self.environment = needed | {ENV_NAME: self.name} | self.environment
        host = self.config.host
        self.url = f"http://{socket.gethostname() if host == '0.0.0.0' else host}:{self.port}"
        self._process: subprocess.Popen | None = None

    @property
    def info(self) -> registry.ServerInfo:
        assert self._process is not None, "not started"
        return registry.ServerInfo(
            name=self.name,
            url=self.url,
            api_key=self.config.api_key,
            tensor_parallel=self.config.tensor_parallel,
            pid=self._process.pid,
        )

    def start(self) -> None:
        """Start the process. Raises ValueError if a GPU is wanted that SGLang could not use."""
        if resolve_device(self.config.device) == "cuda":
            check_cuda()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._process = start_logged(self.argv, self.log_path, self.environment)

    def exit_code(self) -> int | None:
        """Return None while the process runs."""
        assert self._process is not None, "not started"
        return self._process.poll()

    async def wait_ready(self) -> None:
        """Return when GET /health answers 200.

        Raises TimeoutError after `server.start_timeout_s`, and RuntimeError once the process exits.
        """
        timeout = self.config.start_timeout_s
        deadline = time.monotonic() + timeout
        async with SGLangClient(_HEALTH_TIMEOUT_S) as client:
            while True:
                try:
                    return await client.check_reachable(self.info)
                except ServerError as error:
                    reason = error
                end = f"the end of {self.log_path}:\n{tail(self.log_path)}"
                if (code := self.exit_code()) is not None:
                    raise RuntimeError(
                        f"server {self.name} exited with code {code} before it was ready; {end}"
                    )
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"server {self.name}: {self.url}/health did not answer 200 in {timeout:g} s"
                        f" ({reason}); {end}"
                    )
                await asyncio.sleep(0.1)

    def stop(self, grace_s: float = 3.0) -> None:
        """End the server and every process of its group, after `grace_s` seconds by SIGKILL.

        On SIGINT to the leader alone, an idle leader closes its workers in half a second. On
        SIGTERM SGLang would take five seconds or more to finish requests that no longer matter.
        """
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        signal_group(self._process, signal.SIGKILL)
        self._process.wait()


@dataclass(eq=False, repr=False)
class ServerPool:
    """Supervised servers. A context manager: the servers run as long as the block does."""

    run_dir: Path
    make: Mapping[str, Callable[[], ServerProcess]]  # by name, makes the server's next process
    max_restarts: int  # of each server; those before it was ready for an hour do not count
    takes_turns: bool = False  # a trainer uses the GPUs of the servers, too
    _started_at: float = field(default_factory=time.monotonic)
    _came_up: set[str] = field(default_factory=set)
    _drained: set[str] = field(default_factory=set)
    # When the present process of a server became ready, in seconds.
    _ready_at: dict[str, float] = field(default_factory=dict)
    # One thread for the whole block: servers die with the thread that started them.
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "servers"))
    _ended: Future[None] = field(default_factory=Future)

    def __enter__(self) -> "ServerPool":
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self.supervise())
        self._ended = self._thread.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # the supervision has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.shutdown()

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def check(self) -> None:
        """Raise the error that ended the pool, if it has ended. RoleFailed: no server is left."""
        if self._ended.done():
            self._ended.result()

    def wait_ready(self, watch: Callable[[], None] = lambda: None) -> None:
        """Wait until each server has come up once, calling `watch` meanwhile. Raises as `check`."""
        while len(self._came_up) < len(self.make):
            self.check()
            watch()
            time.sleep(0.05)

    @property
    def is_drained(self) -> bool:
        """Return whether all servers have been drained."""
        return self._drained == self.make.keys()

    async def supervise(self) -> None:
        """Run the servers until cancelled. Raises as `check` does.

        Without a server of its own it goes on while the run has others, started elsewhere.
        """
        tasks = [asyncio.create_task(self._supervise(name)) for name in self.make]
        try:
            for ended in asyncio.as_completed(tasks):
                await ended
            if self._drained or registry.announced_servers(self.run_dir):
                await asyncio.Event().wait()
            raise RoleFailed(f"no server is left: see {self.run_dir / LOGS_DIR / LOG}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _supervise(self, name: str) -> None:
        """Run one server, process after process, until its restarts are used up."""
        restarts = in_vain = 0
        while True:
            if (reason := await self._run_once(name)) is None:
                self._drained.add(name)
                return self._log(f"{name} was drained and has ended")
            ready_s = time.monotonic() - self._ready_at.pop(name, math.inf)
            restarts = 1 if ready_s >= _STEADY_S else restarts + 1
            in_vain = 1 if ready_s >= _WORKED_S else in_vain + 1
            if restarts > self.max_restarts:
                self._log(f"{name} is given up after {self.max_restarts} restarts: {reason}")
                return
            delay_s = back_off_s(in_vain)
            attempt = f"restart {restarts} of {self.max_restarts}"
            self._log(f"{name} is started again in {delay_s:g} s ({attempt}): {reason}")
            await asyncio.sleep(delay_s)

    async def _run_once(self, name: str) -> str | None:
        """Run one process to its end; return why, None if drained. Raises if it never came up."""
        server = self.make[name]()
        grace_s = _GRACE_S
        try:
            async with self._gpus_to_start_on():
                server.start()
                await server.wait_ready()
                registry.announce_server(self.run_dir, server.info)
            self._came_up.add(name)
            self._ready_at[name] = time.monotonic()
            self._log(f"{name} is ready {time.monotonic() - self._started_at:.0f} s after start")
            reason = await self._wait_for_end(server)
            grace_s = 0.0
            return reason
        except (RuntimeError, TimeoutError, ValueError, OSError) as error:
            if name not in self._came_up:
                raise
            return str(error)
        finally:
            registry.withdraw_server(self.run_dir, name)
            await asyncio.to_thread(server.stop, grace_s)

    @asynccontextmanager
    async def _gpus_to_start_on(self) -> AsyncIterator[None]:
        """Wait until the trainer leaves the GPUs, and keep it off them inside the block."""
        if not self.takes_turns:
            yield
            return
        with open_gpus_lock(self.run_dir) as lock:
            while not try_lock(lock, fcntl.LOCK_SH):
                await asyncio.sleep(_POLL_INTERVAL_S)
            yield

    async def _wait_for_end(self, server: ServerProcess) -> str | None:
        """Wait until the server exits or is unhealthy; return why, or None if it was drained."""
        while (code := server.exit_code()) is None:
            if reason := registry.unhealthy_reason(self.run_dir, server.info):
                return reason
            if registry.is_announced(self.run_dir, server.name, "draining"):
                return await self._wait_until_idle(server)
            if not registry.is_announced(self.run_dir, server.name):
                self._log(f"{server.name} is announced again: its announcement was removed")
                registry.announce_server(self.run_dir, server.info)
            await asyncio.sleep(_POLL_INTERVAL_S)
        return f"{server.name} {ending(code)}"

    async def _wait_until_idle(self, server: ServerProcess) -> None:
        """Wait until a withdrawn server has no requests and no part in a push, or has failed.

        If it does not say how many it has, they continue on another server.
        """
        run_dir, info = self.run_dir, server.info
        self._log(f"{server.name} finishes its requests and ends: it is drained")
        await asyncio.sleep(_NOTICE_S)
        async with SGLangClient(_HEALTH_TIMEOUT_S) as client:
            with suppress(ServerError):
                while server.exit_code() is None and not registry.unhealthy_reason(run_dir, info):
                    status = read_status(run_dir)
                    pushes = status is not None and status.trainer == TrainerPhase.PUSHING
                    if not pushes and not await client.count_requests(info):
                        return
                    await asyncio.sleep(_POLL_INTERVAL_S)

    def _log(self, text: str) -> None:
        print(visible(text), file=sys.stderr, flush=True)
        append_log(self.run_dir / LOGS_DIR / LOG, text)


def server_pool(
    config: ServerConfig,
    *,
    model: str,
    seed: int,
    run_dir: Path,
    gpus: Mapping[int, list[str]],
    environment: Mapping[str, str] | None = None,
    shared: bool = False,
    max_restarts: int = RestartConfig.max,
) -> ServerPool:
    """Make a pool of SGLang servers. Server number n samples with seed + n.

    gpus: the GPUs of each server, by its number; an empty list: all that this process sees.
    shared: whether a trainer rank uses the same GPU.
    """
    config = replace(config, host=listen_address(config.host))
    extra = {"GLOO_SOCKET_IFNAME": "lo"} if config.host in LOOPBACK else {}
    extra |= environment or {}

    def make(number: int) -> ServerProcess:
        return ServerProcess(
            _beside_trainer(config, gpus[number]) if shared else config,
            model,
            name=f"server-{number}",
            port=free_port(config.host),
            seed=seed + number,
            log_path=run_dir / LOGS_DIR / f"server-{number}.log",
            environment={**gpu_environment(gpus[number]), **extra},
        )

    (run_dir / LOGS_DIR).mkdir(parents=True, exist_ok=True)
    makers = {f"server-{number}": lambda number=number: make(number) for number in gpus}
    return ServerPool(run_dir, makers, max_restarts, config.takes_turns)


def _beside_trainer(config: ServerConfig, gpus: list[str]) -> ServerConfig:
    """Give a server that starts now its share of a GPU, whatever the trainer has taken of it."""
    memory = gpu_memory(gpus[0]) if gpus else None
    if memory is None or config.mem_fraction is None:
        return config
    share = fraction_of_free(config.mem_fraction, memory)
    return replace(config, args=config.args | {"mem_fraction_static": share})


def fraction_of_free(fraction: float, memory: GpuMemory) -> float:
    """Convert a share of a GPU's memory to SGLang's share, which is of the memory that is free.

    SGLang gives weights and KV cache this share of what is free once it has its CUDA context. A
    server that starts again beside a full trainer thus gets the same cache as at first.
    """
    return round(min(fraction * memory.total / max(memory.free - CUDA_CONTEXT, 1), 0.99), 4)


def train_pool(
    config: TrainConfig, run_dir: Path, gpus: Mapping[int, list[str]], beside_store: bool = False
) -> ServerPool:
    """Make the pool of a training run; `gpus` are the GPUs of each server by its number.

    beside_store: whether the controller, which writes the store, is on this machine.
    """
    most = None
    if resolve_device(config.server.device) == "cuda":
        # Its share of the requests and a quarter more, as routing is uneven.
        most = -(-config.rollout.max_concurrent * 5 // (config.server.count * 4))
    flags: dict[str, Any] = {
        "weight_version": registry.UNPUSHED,
        "enable_fp32_lm_head": config.trainer.fp32_head,
        "enable_return_routed_experts": config.algo.routing_replay,
        "max_running_requests": most,
        # SGLang would end a server that makes no step for five minutes, even a parked one.
        "watchdog_timeout": WEEK_S if config.server.takes_turns else None,
    }
    environment = {ENV_READBACK: "1"} if config.sync.verify else {}
    environment |= {ENV_STORE: str(run_dir / STORE_FILE)} if beside_store else {}
    return server_pool(
        replace(config.server, args=flags | config.server.args),
        model=config.model,
        seed=config.seed,
        run_dir=run_dir,
        gpus=gpus,
        environment=environment,
        shared=config.trainer.gpu_memory_fraction is not None,
        max_restarts=config.restart.max,
    )


def pool_beside(config: TrainConfig, run_dir: Path, numbers: Sequence[int]) -> ServerPool:
    """Make a pool of further servers of a run, on the GPUs that this process sees."""
    gpus = visible_gpus() if resolve_device(config.server.device) == "cuda" else []
    shares = divide_gpus(gpus, len(numbers), config.server.tensor_parallel)
    return train_pool(config, run_dir, dict(zip(numbers, shares, strict=True)))


async def supervise_until_end(pool: ServerPool, run_dir: Path) -> None:
    """Run servers until the trainer has written totals, or all are drained. Raises as `check`."""
    servers = asyncio.create_task(pool.supervise())
    while not (servers.done() or pool.is_drained or (run_dir / TOTALS_FILE).exists()):
        await asyncio.sleep(1.0)
    servers.cancel()
    with suppress(asyncio.CancelledError):
        await servers


def main() -> int:
    """Run some servers of a run that was started elsewhere. Returns the exit status."""
    die_with_parent()
    parser = argparse.ArgumentParser(description="Run some servers of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("first", type=int, help="the number of the first server")
    parser.add_argument("count", type=int)
    parser.add_argument("until", nargs="?", choices=["until-end"], help="of the run")
    words = parser.parse_args()
    run_dir, numbers = words.run_dir, range(words.first, words.first + words.count)
    try:
        with interruptible():
            pool = pool_beside(load_config(run_dir), run_dir, numbers)
            asyncio.run(supervise_until_end(pool, run_dir) if words.until else pool.supervise())
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, OSError, ValueError) as error:
        logging.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
