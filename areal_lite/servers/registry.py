"""TODO docstring."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_lite.run_dir.paths import SERVERS_DIR
from areal_lite.system.files import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """How to reach a server. Another `pid` under the same name is another server: it may have other weights."""

    name: str
    url: str
    api_key: str | None
    tensor_parallel: int
    pid: int


def announce_server(run_dir: Path, info: ServerInfo) -> Path:
    """Write `<run_dir>/servers/<name>.json`, for this user's eyes only: it may hold a key."""
    path = _announcement(run_dir, info.name)
    write_atomically(path, json.dumps(asdict(info)), private=True)
    return path


def announced_servers(run_dir: Path) -> list[ServerInfo]:
    """The servers of a run, by name; empty before the first one is there."""
    servers = []
    for path in sorted(Path(run_dir, SERVERS_DIR).glob("*.json")):
        with suppress(FileNotFoundError):  # withdrawn between the listing and the reading
            servers.append(ServerInfo(**json.loads(path.read_text())))
    return servers


def withdraw_server(run_dir: Path, name: str) -> None:
    """Take a server's announcement back, and what was said against it."""
    _announcement(run_dir, name).unlink(missing_ok=True)
    _unhealthy_file(run_dir, name).unlink(missing_ok=True)


def mark_unhealthy(run_dir: Path, server: ServerInfo, reason: str) -> None:
    """Tell whoever started `server`, in `<run_dir>/servers/<name>.unhealthy`, that it does not work and shall be replaced."""
    content = json.dumps({"pid": server.pid, "reason": reason})
    write_atomically(_unhealthy_file(run_dir, server.name), content, private=True)


def unhealthy_reason(run_dir: Path, server: ServerInfo) -> str | None:
    """Why this very process shall be replaced, if it shall."""
    try:
        words = json.loads(_unhealthy_file(run_dir, server.name).read_text())
    except FileNotFoundError:
        return None
    return words["reason"] if words["pid"] == server.pid else None


def _announcement(run_dir: Path, name: str) -> Path:
    return Path(run_dir, SERVERS_DIR, f"{name}.json")


def _unhealthy_file(run_dir: Path, name: str) -> Path:
    return Path(run_dir, SERVERS_DIR, f"{name}.unhealthy")
