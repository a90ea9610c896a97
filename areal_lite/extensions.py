"""Extensions of the core: entry points of installed packages, and functions named by the settings.

The core names a group and an entry, never a module, so it runs without `areal_lite.cpu` and
`areal_lite.tools`. Another package can add entries of its own.
"""

import importlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

# The groups of entry points.
COMMANDS = "areal_lite.commands"  # further commands of `areal-lite`
STAGES = "areal_lite.stages"  # stages of these commands, each a `Command` that runs as a module
MODES = "areal_lite.modes"  # options of the core's commands that show something in place of a run
DEVICES = "areal_lite.devices"  # devices without CUDA; the entry `cpu` is a `Device`
OBSERVERS = "areal_lite.observers"  # displays; `console` is an `Observer` (launch/local.py)
DATA = "areal_lite.data"  # openers of prompts, by `data.source` (data/prompts.py)
# Ways to train, for `debug`: each has `check(config)`, and `run` as launch/local.py calls it.
DEBUG_MODES = "areal_lite.debug"
TRACKERS = "areal_lite.trackers"  # where metrics go besides metrics.jsonl (run_dir/metrics.py)
TRANSPORTS = "areal_lite.transports"  # further transports of weights to servers (weights/push.py)


class Device(Protocol):
    """The parts of a device without CUDA. A module with these functions will do.

    `server_flags` are named as in ServerArgs, and the substitutions are for Megatron-core's source
    (megatron/patches.py). `prepare_server` runs in a server's process before SGLang is imported,
    `install_kernels` replaces operators of the trainer (megatron/kernels.py).
    """

    def rank_environment(self) -> dict[str, str]: ...
    def server_flags(self) -> dict[str, Any]: ...
    def server_environment(self) -> dict[str, str]: ...
    def prepare_server(self) -> None: ...
    def megatron_substitutions(self) -> tuple[Any, ...]: ...
    def install_kernels(self, kernels: Any) -> None: ...


@cache
def names(group: str) -> list[str]:
    """List the entries of a group, sorted by name."""
    return sorted(entry.name for entry in entry_points(group=group))


@cache
def load(group: str, name: str) -> Any:
    """Import an entry and return its object; None if no installed package has it."""
    return next((entry.load() for entry in entry_points(group=group, name=name)), None)


def cpu_device() -> Device:
    """Return the device `cpu`. Raises ValueError if no installed package has it."""
    if (device := load(DEVICES, "cpu")) is None:
        raise ValueError(
            "nothing here computes without a GPU: install the part that does "
            "(pip install 'areal-lite[cpu]'), or use a machine with a GPU"
        )
    return device


def require(module: str, package: str) -> Any:
    """Import a module of an optional package. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install {package}") from None


def load_object(key: str, name: str) -> Callable[..., Any]:
    """Import the callable that the configuration key `key` names, or raise ValueError."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(
            f"{key}={name} must be module:name, such as areal_lite.rollout.episode:single_turn"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of a user can raise anything
        reason = str(error) if isinstance(error, ImportError) else repr(error)
        raise ValueError(f"{key}={name}: cannot import {module_name}: {reason}") from error
    if not callable(found := getattr(module, attribute, None)):
        raise ValueError(f"{key}={name}: {module_name} has no callable {attribute!r}")
    return found
