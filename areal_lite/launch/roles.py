"""The processes of a run, one or more per role, each with a log file, and their GPUs.

* Each runs in a session of its own: Ctrl-C reaches the supervisor only, which ends them in order.
* Each asks the kernel to die with the supervisor, so even a SIGKILL of that leaves none behind.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from areal_lite.config import ServerConfig, TrainConfig, TrainerConfig
from areal_lite.config.rules import check_devices
from areal_lite.extensions import cpu_device
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import HEARTBEATS_DIR, LOGS_DIR, STOP_FILE
from areal_lite.run_dir.resume import start_version, stop_requested
from areal_lite.system.gpus import divide_gpus, gpu_environment, resolve_device, visible_gpus
from areal_lite.system.heartbeat import ENV_HEARTBEAT
from areal_lite.system.network import free_port
from areal_lite.system.processes import dying_with_me, ending, handling, tail

_GRACE_S, _POLL_INTERVAL_S = 10.0, 0.2
_OUTPUT_LINES = 1000


class RoleFailed(RuntimeError):
    """A role failed for good."""


class RunMoved(RoleFailed):
    """Somebody has moved the run directory to `place`. Files by its old name would be another's."""

    def __init__(self, run_dir: Path, place: Path):
        super().__init__(f"run_dir={run_dir} has been moved: it is now {place}")
        self.place = place


class ProcessFailed(RoleFailed):
    """A process ended with an error, or hangs. The message contains the last lines of its log."""

    def __init__(self, role: "Role", what: str):
        end = tail(role.log, start=role.log_start)
        super().__init__(f"{what}; the end of {role.log}:\n{end}")
        self.role = role
        self.what = what


@dataclass
class Role:
    """A running process, and its state as the watchdog has noticed it. Times are in seconds."""

    name: str
    process: subprocess.Popen
    log: Path
    log_start: int  # the size of the log in bytes when it started
    heartbeat: Path
    phase: str = "starting"  # of its newest heartbeat
    beat_at: float = field(default_factory=time.monotonic)  # when that heartbeat was noticed
    beat_ns: int = 0  # the time of that heartbeat in its file, in nanoseconds
    stopped_at: float | None = None  # when it was noticed that a signal has stopped it

    @property
    def group(self) -> str:
        """Return controller or trainer. The processes of a group wait for each other."""
        return self.name.partition("-")[0]

    def output(self) -> str:
        """Return the last lines that this process has written to its log."""
        return tail(self.log, _OUTPUT_LINES, self.log_start)


def start_logged(argv: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a command in a session of its own. It ends with this thread, and appends to `log`."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment, **dying_with_me()},
        )


class Roles:
    """The processes of one run. A context manager: leaving it ends every process."""

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        self.logs = self.run_dir / LOGS_DIR
        self.logs.mkdir(parents=True, exist_ok=True)
        self._folder = os.open(self.run_dir, os.O_RDONLY | os.O_CLOEXEC)
        self._opened = Path(f"/proc/self/fd/{self._folder}")
        self.roles: list[Role] = []

    def __enter__(self) -> "Roles":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        os.close(self._folder)

    def start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> Role:
        """Start the command `argv` with its output appended to logs/<name>.log."""
        log = self.logs / f"{name}.log"
        log_start = log.stat().st_size if log.exists() else 0
        heartbeat = self.run_dir / HEARTBEATS_DIR / name
        more = {ENV_HEARTBEAT: str(heartbeat.absolute()), "PYTHONUNBUFFERED": "1"}
        process = start_logged(argv, log, {**(env or {}), **more})
        role = Role(name, process, log, log_start, heartbeat)
        self.roles.append(role)
        return role

    def start_module(
        self, name: str, module: str, *more: str, env: dict[str, str] | None = None
    ) -> Role:
        """Start `python -m module RUN_DIR MORE`."""
        return self.start(name, [sys.executable, "-m", module, str(self.run_dir), *more], env)

    def start_ranks(self, module: str, config: TrainerConfig, gpus: list[str]) -> list[Role]:
        """Start `python -m module RUN_DIR` once per trainer rank, as torchrun would.

        All ranks see `gpus`. Several ranks are called trainer-RANK.
        """
        # Gloo uses loopback in a world of one, too: rank 0 also connects to the servers.
        common = {"GLOO_SOCKET_IFNAME": "lo", **rank_environment(on_gpu=bool(gpus))}
        common |= gpu_environment(gpus)
        if (world := config.world_size) == 1:
            return [self.start_module("trainer", module, env=common)]
        common |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(free_port())}
        return [
            self.start_module(f"trainer-{n}", module, env={**common, "RANK": n, "LOCAL_RANK": n})
            for n in map(str, range(world))
        ]

    def check(self) -> None:
        """Raise ProcessFailed if a process has ended with an error, and RunMoved.

        Of several, the cause is the one that a signal killed, or else the first that reported an
        error. The others failed because they lost it.
        """
        if not (self.run_dir.exists() and self.run_dir.samefile(self._opened)):
            raise RunMoved(self.run_dir, self._opened.readlink())
        if failed := [role for role in self.roles if role.process.poll() not in (None, 0)]:
            role = min(failed, key=lambda r: (r.process.returncode > 0, r.log.stat().st_mtime))
            raise ProcessFailed(role, f"{role.name} {ending(role.process.returncode)}")

    def wait(self, roles: list[Role], watch: Callable[[], object] = lambda: None) -> None:
        """Wait until `roles` have ended well, and call `watch` now and then. Raises as `check`."""
        while any(role.process.poll() is None for role in roles):
            self.check()
            watch()
            time.sleep(_POLL_INTERVAL_S)
        self.check()
        watch()

    def forget(self, role: Role) -> None:
        """Kill the rest of a role that failed, and forget its failure."""
        signal_group(role.process, signal.SIGKILL)
        role.process.wait()
        self.roles.remove(role)

    def stop(self) -> None:
        """End all processes, newest first: SIGTERM to each group, and SIGKILL ten seconds later."""
        running = [role for role in reversed(self.roles) if role.process.poll() is None]
        for role in running:
            signal_group(role.process, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for role in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                role.process.wait(max(0.0, deadline - time.monotonic()))
        # The children of a process that has ended may still run.
        for role in self.roles:
            signal_group(role.process, signal.SIGKILL)
            role.process.wait()
        self.roles.clear()


# The largest share of a shared GPU. CUDA, CUDA graphs and SGLang's computing need the rest.
_MOST_SHARED = 0.9


@dataclass(frozen=True)
class Placement:
    """GPUs by their names in CUDA_VISIBLE_DEVICES. An empty list: the process uses no GPU.

    The trainer ranks get the first GPUs, one each. The servers get the next ones, `tensor_parallel`
    each. A single GPU is shared by all, by shares of its memory, or all GPUs are, in turn
    (weights/turns.py). Weights then travel through a folder (`sync.transport=disk`), because NCCL
    refuses two ranks on one device.
    """

    trainer: list[str]  # of all ranks
    servers: list[list[str]]  # of each server

    @property
    def shared(self) -> bool:
        """Return whether a server and the trainer share a GPU."""
        return any(gpu in self.trainer for gpus in self.servers for gpu in gpus)


def place_run(config: TrainConfig) -> Placement:
    """Assign the GPUs of this machine to a run. Raises ValueError for devices that do not fit."""
    trainer, server, transport = config.trainer, config.server, config.sync.transport
    check_trainer_device(trainer, "trainer")
    _check_gpu_is_there(server.device, "server")
    devices = resolve_device(trainer.device), resolve_device(server.device)
    check_devices(*devices, transport)
    return place(visible_gpus() if "cuda" in devices else [], trainer, server, transport)


def check_trainer_device(trainer: TrainerConfig, key: str) -> None:
    """Check that the trainer at `key` can use its device on this machine. Raises ValueError."""
    _check_gpu_is_there(trainer.device, key)
    if trainer.device == "cpu" and resolve_device("auto") == "cuda":
        raise ValueError(
            f"{key}.device=cpu on a machine with a GPU, which Megatron-core would use: "
            "hide it with CUDA_VISIBLE_DEVICES="
        )


def _check_gpu_is_there(device: str, key: str) -> None:
    if device == "cuda" and not visible_gpus():
        raise ValueError(
            f"{key}.device=cuda, but no GPU is visible: set {key}.device=cpu, or look at "
            "CUDA_VISIBLE_DEVICES and the driver"
        )


def place(
    gpus: list[str], trainer: TrainerConfig, server: ServerConfig, transport: str
) -> Placement:
    """Assign the visible `gpus`. Raises ValueError for too few, or one that cannot be shared."""
    ranks = trainer.world_size
    size = 0 if server.device == "cpu" else server.tensor_parallel
    needed = ranks + server.count * size
    if not gpus:
        return Placement([], [[] for _ in range(server.count)])
    if server.takes_turns:
        if len(gpus) < ranks:
            raise ValueError(
                f"{len(gpus)} GPUs for {ranks} trainer ranks: lower trainer.data_parallel, or "
                "another of its parallel sizes"
            )
        return Placement(gpus[:ranks], divide_gpus(gpus, server.count, size))
    if len(gpus) == 1 and needed == 2:
        if transport != "disk":
            raise ValueError(
                f"sync.transport={transport} with server and trainer on one GPU: "
                "NCCL refuses that; use +experiment=one_gpu"
            )
        own, other = trainer.gpu_memory_fraction, server.mem_fraction
        if own is None or other is None or own + other > _MOST_SHARED:
            raise ValueError(
                f"trainer.gpu_memory_fraction={own}, server.args.mem_fraction_static={other} on "
                f"one GPU: set both, with a sum of at most {_MOST_SHARED}; +experiment=one_gpu does"
            )
        return Placement(gpus, [gpus])
    if len(gpus) < needed:
        raise ValueError(
            f"{len(gpus)} GPUs for {ranks} trainer ranks and {server.count} servers of "
            f"{size}: {needed} are needed; lower trainer.data_parallel "
            "(or another of its parallel sizes), server.count or server.tensor_parallel"
        )
    return Placement(gpus[:ranks], divide_gpus(gpus[ranks:], server.count, size))


def rank_environment(*, on_gpu: bool) -> dict[str, str]:
    """Return the environment of every trainer rank, on any machine.

    On a GPU a rank has one thread, unless OMP_NUM_THREADS is set. Megatron-core overlaps its
    collectives with computation only if kernels start in the order of their launch, so it gets one
    connection.
    """
    if not on_gpu:
        return cpu_device().rank_environment()
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {"OMP_NUM_THREADS": threads, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def signal_group(process: subprocess.Popen, number: int) -> None:
    """Send a signal to a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into a KeyboardInterrupt, which unwinds through every `with`.

    Python's own handler for SIGINT is not enough: a shell starts background commands with SIGINT
    ignored. Only `nohup` makes a command ignore SIGHUP, and that stays so.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with handling(interrupt, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def stopped_by_hand(run_dir: Path) -> Iterator[None]:
    """Turn the first Ctrl-C, and a terminal that closes, into a request to stop the run.

    The run then finishes its step and saves a checkpoint. A second Ctrl-C is a KeyboardInterrupt,
    and so is the first one when no step would be lost.
    """
    terminals = [number for number in range(3) if os.isatty(number)]

    def stop(number: int, _: object) -> None:
        if number == signal.SIGHUP:  # what is written to a terminal that is gone raises OSError
            for terminal in terminals:
                os.dup2(os.open(os.devnull, os.O_RDWR), terminal)
        steps = read_metrics(run_dir, newest=1)
        spared = bool(steps) and steps[-1]["step"] > start_version(run_dir)
        if stop_requested(run_dir) and number == signal.SIGHUP:
            return
        if stop_requested(run_dir) or not spared:
            raise KeyboardInterrupt
        (run_dir / STOP_FILE).touch()

    with handling(stop, signal.SIGINT, signal.SIGHUP):
        yield
