"""The servers of a run, supervised: started, announced when they answer, started again when they die or are unhealthy_reason.

That a server hangs is found out by the controller, who condemns it (areal_lite/servers/process.py) and moves what runs on it; here it is
killed. It is started again after a pause that doubles with each time, at most `server.max_restarts` times; after that the run goes on
without it. A server that does not come up at all ends the pool at once: trying again would not mend its configuration.

    python -m areal_lite.launch.server_pool RUN_DIR FIRST COUNT      servers FIRST, FIRST + 1, … of a run that goes on elsewhere: they join it, on the GPUs that this process sees
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from areal_lite.config import ServerConfig, TrainConfig, load_config
from areal_lite.launch.roles import RoleFailed, interruptible
from areal_lite.run_dir.paths import LOGS_DIR
from areal_lite.servers.process import ServerProcess
from areal_lite.servers.readback_plugin import ENV_READBACK
from areal_lite.servers.registry import announce_server, unhealthy_reason, withdraw_server
from areal_lite.system.gpus import divide_gpus, gpu_environment, resolve_device, visible_gpus
from areal_lite.system.network import LOOPBACK, free_port, listen_address
from areal_lite.system.processes import die_with_parent

LOG = "servers.log"
_LONGEST_PAUSE_S = 60.0
_LOOK_EVERY_S = 0.2


class ServerPool:
    """`make`: by name, what makes a server's next process. A context manager: the servers run, on a thread of their own, as long as it does."""

    def __init__(
        self, run_dir: Path, make: Mapping[str, Callable[[], ServerProcess]], max_restarts: int
    ):
        self._run_dir, self._make, self._max_restarts = run_dir, make, max_restarts
        self._started = time.monotonic()
        self._came_up: set[str] = set()
        self._failure: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._keeping: asyncio.Task[None] | None = None
        # Servers ask the kernel to die with the thread that started them.
        self._thread = threading.Thread(target=self._run, name="servers")

    def __enter__(self) -> ServerPool:
        self._keeping = self._loop.create_task(self.keep())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._keeping.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keeping)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # handed to whoever looks
            self._failure = error
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def check(self) -> None:
        """Raise what ended the pool: ValueError, RuntimeError or TimeoutError of a server that did not come up, RoleFailed when none is left."""
        if self._failure:
            raise self._failure

    def wait_ready(self, watch: Callable[[], None] = lambda: None) -> None:
        """Until each server has come up, calling `watch` in between. Raises as `check` does."""
        while len(self._came_up) < len(self._make):
            self.check()
            watch()
            time.sleep(0.05)

    async def keep(self) -> None:
        """Runs until cancelled. Raises as `check` does."""
        tasks = [asyncio.create_task(self._keep(name)) for name in self._make]
        try:
            for ended in asyncio.as_completed(tasks):
                await ended
            raise RoleFailed(f"no server is left: see {self._run_dir / 'logs' / LOG}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str) -> None:
        """One server, process after process; returns when it is given up."""
        for restarts in itertools.count(1):
            server, grace_s = self._make[name](), 3.0
            try:
                server.start()
                await server.wait_ready()
                announce_server(self._run_dir, server.info)
                self._came_up.add(name)
                self._say(
                    f"{name} is ready, {time.monotonic() - self._started:.0f} s after the start"
                )
                reason, grace_s = await self._end(server), 0.0
            except (RuntimeError, TimeoutError, ValueError) as error:
                if name not in self._came_up:
                    raise
                reason = str(error)
            finally:
                withdraw_server(self._run_dir, name)
                await asyncio.to_thread(server.stop, grace_s)
            if restarts > self._max_restarts:
                self._say(f"{name} is given up after {self._max_restarts} restarts: {reason}")
                return
            pause_s = min(2.0 ** (restarts - 1), _LONGEST_PAUSE_S)
            self._say(
                f"{name} is started again in {pause_s:g} s (restart {restarts} of {self._max_restarts}): {reason}"
            )
            await asyncio.sleep(pause_s)

    async def _end(self, server: ServerProcess) -> str:
        """Why it has to be started again, as soon as it has."""
        while (code := server.exit_code()) is None:
            if reason := unhealthy_reason(self._run_dir, server.info):
                return reason
            await asyncio.sleep(_LOOK_EVERY_S)
        return f"{server.name} exited with status {code}"

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        with open(self._run_dir / LOGS_DIR / LOG, "a") as log:
            log.write(f"{time.strftime('%F %T')} {text}\n")


def server_pool(
    config: ServerConfig,
    model: str,
    seed: int,
    run_dir: Path,
    gpus: Mapping[int, list[str]],
    environment: dict[str, str],
) -> ServerPool:
    """A pool of the servers with the numbers in `gpus`, each on its own (none: those that this process sees)."""
    config = replace(config, host=listen_address(config.host))
    if config.host in LOOPBACK:
        environment = {"GLOO_SOCKET_IFNAME": "lo", **environment}

    def make(number: int) -> ServerProcess:
        return ServerProcess(
            config,
            model,
            name=f"server-{number}",
            port=config.port + number if config.port else free_port(config.host),
            seed=seed + number,
            log_path=run_dir / LOGS_DIR / f"server-{number}.log",
            environment={**gpu_environment(gpus[number]), **environment},
        )

    (run_dir / LOGS_DIR).mkdir(parents=True, exist_ok=True)
    return ServerPool(
        run_dir,
        {f"server-{number}": lambda number=number: make(number) for number in gpus},
        config.max_restarts,
    )


def train_pool(config: TrainConfig, run_dir: Path, gpus: Mapping[int, list[str]]) -> ServerPool:
    """Servers of a training run, by number."""
    readback = {ENV_READBACK: "1"} if config.sync.verify else {}
    head = {"enable_fp32_lm_head": True} if config.trainer.fp32_head else {}
    server = replace(config.server, args={**head, **config.server.args})
    return server_pool(server, config.model, config.seed, run_dir, gpus, readback)


def main() -> int:
    die_with_parent()
    run_dir, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    try:
        with interruptible():
            config = load_config(run_dir)
            gpus = visible_gpus() if resolve_device(config.server.device) == "cuda" else []
            dealt = divide_gpus(gpus, count, config.server.tensor_parallel)
            asyncio.run(train_pool(config, run_dir, dict(enumerate(dealt, first))).keep())
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, TimeoutError, ValueError) as error:
        logging.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
