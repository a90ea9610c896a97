"""The processes of a run: each with a name and a log file, all ended together, none left behind.

Every role runs in a session of its own, so a Ctrl-C reaches the supervisor alone, which then ends its roles in order; and every role asks the
kernel to die with the supervisor, so that even a SIGKILL of the supervisor leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from areal_lite.config import TrainerConfig
from areal_lite.system.gpus import visible
from areal_lite.system.network import free_port
from areal_lite.system.processes import dying_with_me, tail

_GRACE_S = 10.0


class RoleFailed(RuntimeError):
    """A role ended when it should not have; the message has the end of its log."""


@dataclass
class Role:
    """A running process: `name` is also the name of its log."""

    name: str
    process: subprocess.Popen
    log: Path

    def failure(self) -> RoleFailed:
        return RoleFailed(
            f"{self.name} exited with status {self.process.returncode}; the end of {self.log}:\n{tail(self.log)}"
        )


class Roles:
    """Start, watch and end the roles of one run. Use as a context manager: leaving it ends whatever still runs."""

    def __init__(self, run_dir: Path):
        self.logs = Path(run_dir) / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.roles: list[Role] = []

    def __enter__(self) -> Roles:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> Role:
        """Start `argv`, its output going to logs/<name>.log."""
        log = self.logs / f"{name}.log"
        with open(log, "ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(env or {}), **dying_with_me(), "PYTHONUNBUFFERED": "1"},
            )
        role = Role(name, process, log)
        self.roles.append(role)
        return role

    def start_ranks(
        self, name: str, module: str, run_dir: Path, config: TrainerConfig, gpus: list[str]
    ) -> list[Role]:
        """One process per trainer rank, with the environment that torchrun would give them."""
        world = config.world_size
        # Loopback for gloo in a world of one too: rank 0 also meets the servers.
        common = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(config.threads),
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            **visible(gpus),
        }
        argv = [sys.executable, "-m", module, str(run_dir)]
        if world == 1:
            return [self.start(name, argv, common)]
        meeting = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        return [
            self.start(
                f"{name}-{rank}",
                argv,
                {**common, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world)
        ]

    def check(self) -> None:
        """Raise RoleFailed if a role has ended with an error."""
        for role in self.roles:
            if role.process.poll() not in (None, 0):
                raise role.failure()

    def wait(self, roles: list[Role], poll_s: float = 0.2, watch=lambda: None) -> None:
        """Until all of `roles` have ended well, calling `watch` in between. Raises RoleFailed as soon as any role of the run fails."""
        while any(role.process.poll() is None for role in roles):
            self.check()
            watch()
            time.sleep(poll_s)
        self.check()
        watch()

    def stop(self) -> None:
        """End what still runs, the last started first: SIGTERM to its process group, SIGKILL after a grace period."""
        running = [role for role in reversed(self.roles) if role.process.poll() is None]
        for role in running:
            _signal(role, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for role in running:
            try:
                role.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        for role in self.roles:  # also of roles that have ended: their children may not have
            _signal(role, signal.SIGKILL)
            role.process.wait()
        self.roles.clear()


def _signal(role: Role, number: int) -> None:
    try:
        os.killpg(role.process.pid, number)
    except ProcessLookupError:
        pass


@contextlib.contextmanager
def interruptible():
    """SIGINT and SIGTERM end the command by an exception that unwinds through every `with`.

    Explicitly: a shell starts what it puts into the background with SIGINT ignored.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
