"""The processes of a run, one or more per role, each with a log file.

* Each runs in a session of its own: Ctrl-C reaches the supervisor only, which ends them in order.
* Each asks the kernel to die with the supervisor, so even a SIGKILL of that leaves none behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_lite.config import TrainerConfig
from areal_lite.extensions import cpu_device
from areal_lite.run_dir.paths import HEARTBEATS_DIR, LOGS_DIR
from areal_lite.system.gpus import gpu_environment
from areal_lite.system.heartbeat import ENV_HEARTBEAT
from areal_lite.system.network import free_port
from areal_lite.system.processes import dying_with_me

_GRACE_S = 10.0
_SHOWN_LINES = 20
_MAX_OUTPUT_BYTES = 65536


class RoleFailed(RuntimeError):
    """A role failed for good."""


class ProcessFailed(RoleFailed):
    """A process ended with an error, or hangs. The message contains the last lines of its log."""

    def __init__(self, role: Role, what: str):
        end = "\n".join(role.output().splitlines()[-_SHOWN_LINES:])
        super().__init__(f"{what}; the end of {role.log}:\n{end}")
        self.role = role
        self.what = what


@dataclass
class Role:
    """A running process. `log_start` is the size of the log in bytes when it started."""

    name: str
    process: subprocess.Popen
    log: Path
    log_start: int
    heartbeat: Path

    def output(self) -> str:
        """Return the last 64 KiB that this process has written to its log."""
        with open(self.log, "rb") as log:
            log.seek(max(self.log_start, log.seek(0, os.SEEK_END) - _MAX_OUTPUT_BYTES))
            return log.read().decode(errors="replace")


class Roles:
    """The processes of one run. A context manager: leaving it ends every process."""

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        self.logs = self.run_dir / LOGS_DIR
        self.logs.mkdir(parents=True, exist_ok=True)
        self.roles: list[Role] = []

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> Role:
        """Start the command `argv` with its output appended to logs/<name>.log."""
        log = self.logs / f"{name}.log"
        heartbeat = self.run_dir / HEARTBEATS_DIR / name
        with open(log, "ab") as output:
            log_start = output.tell()
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    **(env or {}),
                    **dying_with_me(),
                    ENV_HEARTBEAT: str(heartbeat.absolute()),
                    "PYTHONUNBUFFERED": "1",
                },
            )
        role = Role(name, process, log, log_start, heartbeat)
        self.roles.append(role)
        return role

    def start_module(
        self, name: str, module: str, *more: str, env: dict[str, str] | None = None
    ) -> Role:
        """Start `python -m module RUN_DIR MORE`."""
        return self.start(name, [sys.executable, "-m", module, str(self.run_dir), *more], env)

    def start_ranks(
        self, name: str, module: str, config: TrainerConfig, gpus: list[str]
    ) -> list[Role]:
        """Start `python -m module RUN_DIR` once per trainer rank, as torchrun would.

        Args:
            name: the name of the only rank; with more ranks `-<rank>` is added.
            config: says how many ranks there are.
            gpus: the GPUs that all ranks may see.
        """
        # Gloo uses loopback in a world of one, too: rank 0 also connects to the servers.
        common = {
            "GLOO_SOCKET_IFNAME": "lo",
            **rank_environment(on_gpu=bool(gpus)),
            **gpu_environment(gpus),
        }
        world = config.world_size
        if world == 1:
            return [self.start_module(name, module, env=common)]
        common |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(free_port())}
        ranks = map(str, range(world))
        return [
            self.start_module(f"{name}-{n}", module, env={**common, "RANK": n, "LOCAL_RANK": n})
            for n in ranks
        ]

    def check(self) -> None:
        """Raise ProcessFailed if a process has ended with an error.

        Of several, the cause is the one that a signal killed, or else the first that reported an
        error. The others failed because they lost it.
        """
        failed = [role for role in self.roles if role.process.poll() not in (None, 0)]
        if failed:
            role = min(
                failed, key=lambda one: (one.process.returncode > 0, one.log.stat().st_mtime)
            )
            raise ProcessFailed(role, f"{role.name} exited with status {role.process.returncode}")

    def wait(
        self, roles: list[Role], poll_s: float = 0.2, watch: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until all of `roles` have ended well. Raises ProcessFailed when any process fails.

        `watch` is called every `poll_s` seconds, and once after the end.
        """
        while any(role.process.poll() is None for role in roles):
            self.check()
            watch()
            time.sleep(poll_s)
        self.check()
        watch()

    def forget(self, role: Role) -> None:
        """Kill the rest of a role that failed, and forget its failure."""
        signal_group(role, signal.SIGKILL)
        role.process.wait()
        self.roles.remove(role)

    def stop(self) -> None:
        """End all processes, starting with the newest.

        Each process group gets a SIGTERM, and a SIGKILL ten seconds later.
        """
        running = [role for role in reversed(self.roles) if role.process.poll() is None]
        for role in running:
            signal_group(role, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for role in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                role.process.wait(max(0.0, deadline - time.monotonic()))
        # The children of a process that has ended may still run.
        for role in self.roles:
            signal_group(role, signal.SIGKILL)
            role.process.wait()
        self.roles.clear()


def rank_environment(*, on_gpu: bool) -> dict[str, str]:
    """Return the environment of every trainer rank, on any machine; one thread, unless it is set.

    Megatron-core overlaps its collectives with computation only if kernels start in the order of
    their launch, so a GPU gets one connection.
    """
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if on_gpu:
        return threads | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return threads | cpu_device().rank_environment()


def signal_group(role: Role, number: int) -> None:
    """Send a signal to a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(role.process.pid, number)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a KeyboardInterrupt, which unwinds through every `with`.

    Python's own handler for SIGINT is not enough: a shell starts background commands with SIGINT
    ignored.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
