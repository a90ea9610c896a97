"""Run `areal-lite servers`: list the servers of a run that is going on, add some, or drain one.

Servers that are added run until the run ends, they are drained, or Ctrl-C. They get requests after
the next push.
"""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from areal_lite.config import TrainConfig, load_config
from areal_lite.controller.protocol import Address
from areal_lite.launch.preflight import check_model, check_servers
from areal_lite.launch.server_pool import pool_beside, supervise_until_end
from areal_lite.run_dir.controller_status import read_status
from areal_lite.run_dir.paths import CONTROLLER_FILE, LOGS_DIR
from areal_lite.servers.client import ServerError, SGLangClient
from areal_lite.servers.registry import ServerInfo, announced_servers, drain_server, is_announced
from areal_lite.system.files import read_regular
from areal_lite.system.network import NODE
from areal_lite.system.processes import process_namespace, visible
from areal_lite.tools.commands import ServersConfig

_TIMEOUT_S = 10.0
_DRAINING = "draining"
_COLUMNS = ("name", "address", "state", "version", "requests")


def check(config: ServersConfig) -> None:
    """Check the run, and what is asked for. Raises ValueError."""
    run_dir = Path(config.run_dir)
    settings = load_config(run_dir)
    if config.add and config.drain:
        raise ValueError(f"add={config.add} and drain={config.drain}: give one of them at a time")
    if config.add:
        _check_addition(settings, run_dir)
    if config.drain:
        _check_drain(run_dir, config.drain)


def run(config: ServersConfig) -> int:
    """List the servers, add some, or drain one. Returns the exit status."""
    run_dir = Path(config.run_dir)
    if config.add:
        return _add(run_dir, config.add)
    if config.drain:
        return _drain(run_dir, config.drain)
    rows = [_COLUMNS, *asyncio.run(list_servers(run_dir))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(visible("  ".join(cells).rstrip()))
    return 0


async def list_servers(run_dir: Path) -> list[tuple[str, ...]]:
    """Return name, address, state, version and requests of each server, by name."""
    wanted = status.version if (status := read_status(run_dir)) else None
    async with SGLangClient(_TIMEOUT_S) as client:

        async def describe(server: ServerInfo) -> tuple[str, ...]:
            try:
                version = await client.weight_version(server)
                requests = await client.count_requests(server)
            except ServerError:
                return server.name, server.url, "no answer", "", ""
            state = "ready" if version == wanted else f"waits for version {wanted}"
            if is_announced(run_dir, server.name, _DRAINING):
                state = _DRAINING
            elif wanted is None:
                state = "no controller"
            shown = "none" if version < 0 else str(version)
            return server.name, server.url, state, shown, str(requests)

        servers = announced_servers(run_dir) + announced_servers(run_dir, _DRAINING)
        return sorted(await asyncio.gather(*map(describe, servers)))


def _check_addition(config: TrainConfig, run_dir: Path) -> None:
    """Check that a server on this machine can join the run. Raises ValueError."""
    try:
        controller = msgspec.json.decode(read_regular(run_dir / CONTROLLER_FILE), type=Address)
    except (OSError, ValueError) as error:
        raise ValueError(f"run_dir={run_dir}: no run is going on there, start it first") from error
    host = config.server.host
    if controller.namespace != process_namespace() and host not in (NODE, "0.0.0.0"):
        raise ValueError(
            f"server.host={host}: the run is elsewhere, on {controller.namespace.split()[0]}, and "
            "could not reach a server here; start the run with server.host=node "
            "server.api_key='${oc.env:NAME}'"
        )
    check_model("model", config.model)
    check_servers(config.server, config.model)


def _add(run_dir: Path, count: int) -> int:
    """Start servers, and supervise them until the run ends. Returns the exit status."""
    config = load_config(run_dir)
    numbers = claim_numbers(run_dir / LOGS_DIR, config.server.count, count)
    names = ", ".join(f"server-{number}" for number in numbers)
    print(f"starting {names} until the run ends, or Ctrl-C: see {run_dir / LOGS_DIR}")
    asyncio.run(supervise_until_end(pool_beside(config, run_dir, numbers), run_dir))
    return 0


def claim_numbers(logs: Path, first: int, count: int) -> list[int]:
    """Return numbers of new servers. Making their logs keeps others from taking them, too."""
    numbers: list[int] = []
    while len(numbers) < count:
        with suppress(FileExistsError):
            (logs / f"server-{first}.log").touch(exist_ok=False)
            numbers.append(first)
        first += 1
    return numbers


def _check_drain(run_dir: Path, name: str) -> None:
    """Check that a server can be drained. Raises ValueError."""
    names = [server.name for server in announced_servers(run_dir)]
    if name not in names + [server.name for server in announced_servers(run_dir, _DRAINING)]:
        there = ", ".join(names) or "none"
        raise ValueError(f"drain={name}: no such server of {run_dir}; there are {there}")
    if names == [name]:
        raise ValueError(
            f"drain={name} is the only server of {run_dir}, and the run could not go on: add one "
            f"first (areal-lite servers {run_dir} add=1)"
        )


def _drain(run_dir: Path, name: str) -> int:
    """Drain a server and wait for its end. Returns the exit status."""
    if not is_announced(run_dir, name, _DRAINING):
        drain_server(run_dir, name)
    print(f"{name} takes no new requests: waiting until it has finished its own", flush=True)
    while is_announced(run_dir, name, _DRAINING):
        time.sleep(0.5)
    print(f"{name} has ended")
    return 0
