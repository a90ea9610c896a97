"""Extensions of the core: entry points of installed packages, loaded when first needed.

The core names a group and an entry, never a module, so it runs without `areal_lite.cpu` and
`areal_lite.tools`. Another package can add entries of its own.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

COMMANDS = "areal_lite.commands"
"""Commands of `areal-lite`, besides those of the core."""
DEVICES = "areal_lite.devices"
"""Devices without CUDA. The entry `cpu` is a `Device`."""

OBSERVERS = "areal_lite.observers"
"""What a person sees of a run. The entry `console` is an `Observer` (launch/observer.py)."""

DEBUG_MODES = "areal_lite.debug"
"""Halves of a run, for `debug`: each has `check(config)`, and `run` as launch/local.py calls it."""
TRACKERS = "areal_lite.trackers"
"""Where metrics go besides metrics.jsonl (run_dir/metrics.py)."""
TRANSPORTS = "areal_lite.transports"
"""Ways of the weights to the servers, besides those of the core (weights/transport.py)."""


class Device(Protocol):
    """The parts of a device without CUDA. A module with these functions will do."""

    def rank_environment(self) -> dict[str, str]:
        """Return the environment of a trainer rank."""
        ...

    def server_flags(self) -> dict[str, Any]:
        """Return the options of an SGLang server, by the names of its ServerArgs."""
        ...

    def server_environment(self) -> dict[str, str]:
        """Return the environment of an SGLang server."""
        ...

    def prepare_server(self) -> None:
        """Prepare a server's process, before SGLang is imported."""
        ...

    def megatron_substitutions(self) -> tuple[Any, ...]:
        """Return the substitutions in Megatron-core's source (megatron/patches.py)."""
        ...

    def install_kernels(self, kernels: Any) -> None:
        """Replace operators of the trainer (megatron/kernels.py)."""
        ...


STAGES = "areal_lite.stages"
"""Stages of those commands, each a `Command` that is run as a module of its own."""

DATA = "areal_lite.data"
"""Openers of prompts, by `data.source` (data/prompts.py)."""

MODES = "areal_lite.modes"
"""Options of the core's commands that show something instead of starting a run."""


@cache
def names(group: str) -> list[str]:
    """List the entries of a group, sorted by name."""
    return sorted(entry.name for entry in entry_points(group=group))


@cache
def load(group: str, name: str) -> Any:
    """Import an entry and return its object; None if no installed package has it."""
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    return found[0].load() if found else None


def cpu_device() -> Device:
    """Return the device `cpu`. Raises ValueError if no installed package has it."""
    device = load(DEVICES, "cpu")
    if device is None:
        raise ValueError(
            "nothing here computes without a GPU: install the part that does "
            "(pip install 'areal-lite[cpu]'), or use a machine with a GPU"
        )
    return device
