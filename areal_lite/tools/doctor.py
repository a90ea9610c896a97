"""Run `areal-lite doctor`: check this machine, and print a line for each check.

Each check returns what it found, or raises ValueError with the problem and its remedy. The last one
trains a small model: it needs most of the time, and `quick=true` leaves it out.
"""

import fcntl
import re
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

from areal_lite.launch.roles import RoleFailed, Roles
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store import Store
from areal_lite.system.files import try_lock
from areal_lite.system.gpus import MIN_DRIVER, check_cuda, visible_gpus
from areal_lite.system.network import free_port
from areal_lite.system.processes import tail
from areal_lite.tools.commands import DoctorConfig
from areal_lite.tools.machine import available_memory, problems

PINNED = ("torch", "transformers", "megatron-core", "sglang")
PLUGINS = {"areal_lite", "areal_lite_cpu", "areal_lite_delta", "areal_lite_memory"}
MAX_CLOCK_SKEW_S = 5.0
RUN_TIMEOUT_S = 900.0
MAX_LOGPROB_DIFF = 0.1  # nats; bfloat16 on a GPU takes a tenth of it
RUN_SETTINGS = (
    "make_model.num_layers=1 make_model.hidden_size=64 make_model.mlp_size=64 sft.trainer.steps=1 "
    "sft.trainer.lr_warmup_steps=0 sft.batch_size=4 data.args.max_digits=2 schedule=sync "
    "trainer.steps=2 trainer.batch_groups=4 trainer.minibatches=1 trainer.lr=0.01 "
    "trainer.lr_warmup_steps=0 rollout.group_size=4 rollout.max_new_tokens=16 eval.problems=0 "
    f"sync.verify=true reward.function={__name__}:share_of_digits"
).split()
_PIN = re.compile(r"([\w-]+)==([^\s;]+)")
_INSTALL = "install again (README.md, Start)"
_RUN_REMEDY = "`areal-lite quickstart` repeats it and keeps all logs; see docs/operations.md"
_OTHER = "choose a run directory on a local disk, or another network file system"


def run(config: DoctorConfig) -> int:
    """Print a line for each check. The exit status is 1 if one fails."""
    wanted = Path(config.folder).absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    checks: dict[str, Callable[[], str]] = {
        "machine": lambda: check_machine(folder),
        "GPU": check_gpu,
        "versions": check_versions,
        "plugins": check_plugins,
        "ports": lambda: f"port {free_port()} of 127.0.0.1 is free",
        "locks": lambda: check_locks(folder),
        "store": lambda: check_store(folder),
        "clock": lambda: check_clock(folder),
    }
    failed = [name for name, check in checks.items() if not _passes(name, check)]
    if failed or config.quick:
        left_out = "until what failed is mended" if failed else "left out by --quick"
        print(f"skip  run                {left_out}")
        return 1 if failed else 0
    print("a small model is trained now, for about a minute", file=sys.stderr)
    return 0 if _passes("run", lambda: check_run(folder)) else 1


def _passes(name: str, check: Callable[[], str]) -> bool:
    """Run a check, print its line with the seconds that it took, and tell whether it passed."""
    started = time.monotonic()
    try:
        status, text = "ok  ", check()
    except (ValueError, OSError) as error:
        status, text = "FAIL", str(error)
    print(f"{status}  {name:<9} {time.monotonic() - started:5.1f} s  {text}", flush=True)
    return status == "ok  "


def check_machine(folder: Path) -> str:
    """Check system, Python, compiler, disk, memory and loopback."""
    if found := list(problems(folder)):
        raise ValueError("; ".join(found))
    memory = f"{(available_memory() or 0) / 1e9:.0f} GB of memory available"
    return f"{memory}, {shutil.disk_usage(folder).free / 1e9:.0f} GB free at {folder}"


def check_gpu() -> str:
    """Check the driver and the CUDA toolkit, if there is a GPU."""
    if not (gpus := visible_gpus()):
        return "none: servers and trainer compute on the CPU"
    check_cuda()
    return f"{len(gpus)}, driver {MIN_DRIVER} or newer, and a CUDA compiler"


def check_versions() -> str:
    """Compare installed versions with those that the package is pinned to."""
    pins = dict(_PIN.findall("\n".join(metadata.requires("areal-lite") or ())))
    wrong, right = [], []
    for name in PINNED:
        try:
            version = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            version = "missing"
        (right if version == pins[name] else wrong).append(f"{name} {version}")
    if wrong:
        tested = ", ".join(f"{name} {pins[name]}" for name in PINNED)
        raise ValueError(f"{', '.join(wrong)}: {_INSTALL}; tested: {tested}")
    return ", ".join(right)


def check_plugins() -> str:
    """Check that servers would find the plugins of this package."""
    found = {entry.name for entry in metadata.distribution("areal-lite").entry_points}
    if missing := PLUGINS - found:
        raise ValueError(f"SGLang would not find {', '.join(sorted(missing))}: {_INSTALL}")
    return "SGLang finds the plugins of this package"


def check_locks(folder: Path) -> str:
    """Check that a file in `folder` can be locked by one process only."""
    with tempfile.NamedTemporaryFile(dir=folder) as first, open(first.name, "rb") as second:
        try:
            try_lock(first, fcntl.LOCK_EX)
        except OSError as error:
            reason = error.strerror
            raise ValueError(f"{folder}: no file can be locked ({reason}): {_OTHER}") from None
        if not try_lock(second, fcntl.LOCK_EX):
            return f"files in {folder} can be locked"
    raise ValueError(f"{folder}: two can lock one file: {_OTHER}")


def check_store(folder: Path) -> str:
    """Check that SQLite can write and read at the same time in `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "store.sqlite"
        try:
            with closing(Store(path)) as writer, closing(RunReader(path)) as reader:
                writer.begin()
                reader.counts()
                has_log = path.with_name(f"{path.name}-wal").exists()
        except ValueError as error:
            raise ValueError(f"{folder}: SQLite fails ({error}): {_OTHER}") from None
    if not has_log:
        raise ValueError(f"{folder}: SQLite has no write-ahead log there: {_OTHER}")
    return f"SQLite {sqlite3.sqlite_version} writes and reads at a time in {folder}"


def check_clock(folder: Path) -> str:
    """Compare this machine's clock with the file system's."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        skew = abs(time.time() - Path(file.name).stat().st_mtime)
    if skew > MAX_CLOCK_SKEW_S:
        raise ValueError(
            f"the file system of {folder} is {skew:.0f} s off this machine's clock: set both by NTP"
        )
    return f"{skew:.1f} s off the file system's"


def check_run(folder: Path) -> str:
    """Train a small model for two steps, with a server and a trainer, in a folder that is removed.

    The second step trains on data that the server generated with the pushed weights.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="doctor-") as scratch:
        run_dir = Path(scratch) / "run"
        command = [sys.executable, "-m", "areal_lite", "quickstart", f"run_dir={run_dir}"]
        deadline = time.monotonic() + RUN_TIMEOUT_S

        def watch() -> None:
            if time.monotonic() > deadline:
                took = f"not done after {RUN_TIMEOUT_S:.0f} s"
                raise RoleFailed(f"{took}; the end of its log:\n{tail(role.log)}")

        try:
            with Roles(Path(scratch)) as roles:
                role = roles.start("run", [*command, *RUN_SETTINGS])
                roles.wait([role], watch=watch)
        except RoleFailed as error:
            raise ValueError(f"{error}\n{_RUN_REMEDY}") from None
        return _agreement(read_metrics(run_dir))


def _agreement(steps: list[dict[str, Any]]) -> str:
    """Say how a run of two steps went. Raises ValueError when server and trainer disagree."""
    difference, pause = steps[-1]["logprob_diff"], steps[0]["pause_s"]
    agree = difference is not None and difference <= MAX_LOGPROB_DIFF
    if not (steps[0]["verified"] and agree):
        raise ValueError(
            f"after a push the log-probs of server and trainer differ by {difference} nats: other "
            f"versions than the tested ones would explain it; {_INSTALL}"
        )
    return (
        f"a server and a trainer made {len(steps)} steps; a push paused for {1000 * pause:.0f} ms, "
        f"then their log-probs differ by {difference:.1g} nats"
    )


def share_of_digits(completion: str, answer: str) -> float:
    """Return the share of digits: a reward that even a random model gets some of."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
