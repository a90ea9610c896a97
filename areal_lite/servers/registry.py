"""The servers of a run: small files under `<run_dir>/servers/` by which others find them.

<name>.json         the announcement: the server is up, and how to reach it
<name>.unhealthy    the server has failed: the process that started it should replace it
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_lite.system.files import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """How to reach a server. Another `pid` is another server: it may have other weights."""

    name: str
    url: str
    api_key: str | None
    tensor_parallel: int
    pid: int

    def __str__(self) -> str:
        return f"server {self.name} ({self.url})"


def announce_server(run_dir: Path, info: ServerInfo) -> Path:
    """Write the announcement of a server. Only this user can read it: it may hold a key."""
    path = _announcement(run_dir, info.name)
    write_atomically(path, json.dumps(asdict(info)), private=True)
    return path


def announced_servers(run_dir: Path) -> list[ServerInfo]:
    """Return the announced servers, by name."""
    servers = []
    for path in sorted(Path(run_dir, "servers").glob("*.json")):
        with suppress(FileNotFoundError):  # withdrawn after it was listed
            servers.append(ServerInfo(**json.loads(path.read_text())))
    return servers


def withdraw_server(run_dir: Path, name: str) -> None:
    """Remove both files of a server."""
    _announcement(run_dir, name).unlink(missing_ok=True)
    _unhealthy_file(run_dir, name).unlink(missing_ok=True)


def mark_unhealthy(run_dir: Path, server: ServerInfo, reason: str) -> None:
    """Ask the process that started `server` to replace it."""
    content = json.dumps({"pid": server.pid, "reason": reason})
    write_atomically(_unhealthy_file(run_dir, server.name), content, private=True)


def unhealthy_reason(run_dir: Path, server: ServerInfo) -> str | None:
    """Return why `server` should be replaced; None if it should not."""
    try:
        record = json.loads(_unhealthy_file(run_dir, server.name).read_text())
    except FileNotFoundError:
        return None
    return record["reason"] if record["pid"] == server.pid else None


def _announcement(run_dir: Path, name: str) -> Path:
    return Path(run_dir, "servers", f"{name}.json")


def _unhealthy_file(run_dir: Path, name: str) -> Path:
    return Path(run_dir, "servers", f"{name}.unhealthy")
