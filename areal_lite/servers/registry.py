"""The servers of a run: how others find them, and which of them a trajectory goes to.

`<run_dir>/servers/NAME.json` announces a server that is up, and how to reach it. NAME.unhealthy
asks the process that started it to replace it. Renamed to NAME.draining, an announcement asks it to
end the server once its requests are finished.

The router chooses the least loaded server that is ready: whose version is the trainer's. A server
that has just started is stale until its first push. One that failed is left out until another
process is announced under its name.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
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


def announce_server(run_dir: Path, info: ServerInfo) -> None:
    """Write the announcement of a server. Only this user can read it: it may hold a key."""
    write_atomically(_file(run_dir, info.name), json.dumps(asdict(info)), private=True)


def is_announced(run_dir: Path, name: str, kind: str = "json") -> bool:
    """Return whether a server has an announcement. `kind` is as in `announced_servers`."""
    return _file(run_dir, name, kind).exists()


def announced_servers(run_dir: Path, kind: str = "json") -> list[ServerInfo]:
    """Return the announced servers, by name. A malformed announcement is logged and left out.

    kind: json, or draining for servers that take no new requests.
    """
    servers = []
    for path in announcements(run_dir, kind):
        with suppress(OSError):  # withdrawn after it was listed
            if path.is_file():  # a pipe would block
                servers.append(_parse(path, path.read_bytes()))
    return [server for server in servers if server]


def announcements(run_dir: Path, kind: str = "json") -> list[Path]:
    """List the files of the announced servers, by name. `kind` is as in `announced_servers`."""
    return sorted(Path(run_dir, "servers").glob(f"*.{kind}"))


def drain_server(run_dir: Path, name: str) -> None:
    """Withdraw a server that finishes its requests and then ends, for good."""
    _file(run_dir, name).rename(_file(run_dir, name, "draining"))


@lru_cache(maxsize=1024)  # cached, so that a malformed file is logged once and not at every look
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
    """Remove all files of a server."""
    for kind in ("json", "unhealthy", "draining"):
        _file(run_dir, name, kind).unlink(missing_ok=True)


def mark_unhealthy(run_dir: Path, server: ServerInfo, reason: str) -> None:
    """Ask the process that started `server` to replace it."""
    content = json.dumps({"pid": server.pid, "reason": reason})
    write_atomically(_file(run_dir, server.name, "unhealthy"), content, private=True)


def unhealthy_reason(run_dir: Path, server: ServerInfo) -> str | None:
    """Return why `server` should be replaced; None if it should not."""
    try:
        record = json.loads(_file(run_dir, server.name, "unhealthy").read_text())
    except FileNotFoundError:
        return None
    return record["reason"] if record["pid"] == server.pid else None


def _file(run_dir: Path, name: str, kind: str = "json") -> Path:
    return Path(run_dir, "servers", f"{name}.{kind}")


UNTRUSTED = -1  # The version of a server whose weights are not known. It is stale until a push.
UNPUSHED = "unpushed"  # the version that a server of a run reports before its first push


def least_loaded(servers: Iterable[ServerInfo], load: Mapping[str, int]) -> ServerInfo | None:
    """Return the server with the fewest trajectories per tensor-parallel rank, then by name."""
    return min(servers, key=lambda s: (load[s.name] / s.tensor_parallel, s.name), default=None)


@dataclass(eq=False, repr=False)
class Router:
    """The announced servers, the versions that they hold, and their trajectories in flight."""

    version: int = 0  # the trainer's
    pushing: int = 0  # the last version whose push has begun
    servers: dict[str, ServerInfo] = field(default_factory=dict)  # by name
    load: Counter[str] = field(default_factory=Counter)  # trajectories in flight, by name
    # Only of servers that reported their version or took a push.
    _versions: dict[ServerInfo, int] = field(default_factory=dict)
    _failed: set[ServerInfo] = field(default_factory=set)

    def update_servers(self, announced: Iterable[ServerInfo]) -> list[ServerInfo]:
        """Take over the announced servers, without processes that failed. Return the new ones."""
        current = {s.name: s for s in announced if s not in self._failed}
        if current == self.servers:  # nearly always
            return []
        new = [s for name, s in current.items() if self.servers.get(name) != s]
        self.servers = current
        self._versions = {s: v for s, v in self._versions.items() if current.get(s.name) == s}
        return new

    def record_version(self, server: ServerInfo, version: int) -> None:
        """Record that `server` reported `version`. A push in the meantime takes precedence."""
        if self.servers.get(server.name) == server:
            self._versions.setdefault(server, version)

    def record_push(self, server: ServerInfo) -> None:
        if self.servers.get(server.name) == server:
            self._versions[server] = self.version

    def mark_failed(self, server: ServerInfo) -> bool:
        """Leave `server` out. Return whether it was in use until now."""
        self._failed.add(server)
        if self.servers.get(server.name) != server:
            return False
        del self.servers[server.name]
        self._versions.pop(server, None)
        return True

    @property
    def ready(self) -> set[str]:
        """Return the names of the ready servers."""
        return {s.name for s, version in self._versions.items() if version == self.version}

    @property
    def stale(self) -> list[ServerInfo]:
        stale = (s for s, version in self._versions.items() if version != self.version)
        return sorted(stale, key=lambda s: s.name)

    def is_ready(self, server: ServerInfo) -> bool:
        return self._versions.get(server) == self.version

    def choose(self, prefer: Iterable[ServerInfo] = ()) -> ServerInfo | None:
        """Return the least loaded ready server in `prefer`, which hold a prefix, or else of all."""
        preferred = least_loaded(filter(self.is_ready, prefer), self.load)
        return preferred or least_loaded(filter(self.is_ready, self._versions), self.load)
