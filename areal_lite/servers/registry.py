"""The servers of a run: small files under `<run_dir>/servers/` by which others find them.

<name>.json         the announcement: the server is up, and how to reach it
<name>.unhealthy    the server has failed: the process that started it should replace it
"""

import json
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from areal_lite.system.files import write_atomically

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The address of a server. Another `pid` is another server: it may have other weights."""

    name: str
    url: str
    api_key: str | None
    tensor_parallel: int
    pid: int

    def __hash__(self) -> int:
        return hash(self.name)  # each request looks servers up several times

    def __str__(self) -> str:
        return f"server {self.name} ({self.url})"


def announce_server(run_dir: Path, info: ServerInfo) -> Path:
    """Write the announcement of a server. Only this user can read it: it may hold a key."""
    path = _announcement(run_dir, info.name)
    write_atomically(path, json.dumps(asdict(info)), private=True)
    return path


def is_announced(run_dir: Path, name: str) -> bool:
    """Return whether a server has an announcement."""
    return _announcement(run_dir, name).exists()


def announced_servers(run_dir: Path) -> list[ServerInfo]:
    """Return the announced servers, by name. A malformed announcement is logged and left out."""
    servers = []
    for path in announcements(run_dir):
        with suppress(FileNotFoundError):  # withdrawn after it was listed
            servers.append(_parse(path, path.read_bytes()))
    return [server for server in servers if server]


def announcements(run_dir: Path) -> list[Path]:
    """List the files of the announced servers, by name."""
    return sorted(Path(run_dir, "servers").glob("*.json"))


# Cached, so that a malformed file is logged once and not at every look.
@lru_cache(maxsize=1024)
def _parse(path: Path, raw: bytes) -> ServerInfo | None:
    try:
        info = msgspec.json.decode(raw, type=ServerInfo)
        if info.name != path.stem or not urlsplit(info.url).hostname:
            raise ValueError(
                f"name={info.name!r:.100} and url={info.url!r:.100} are not a server's"
            )
    except Exception as error:  # decoders raise more than ValueError, such as RecursionError
        log.warning("%s is left out: %s: %s", path, type(error).__name__, error)
        return None
    return info


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
