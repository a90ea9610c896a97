"""Which server a request goes to: the least loaded one that works and has the trainer's weights.

A server takes requests while the version that it holds is the trainer's. One that joins late or comes back has older weights than the
trajectories in flight: it is `stale` until a push brings it up. One that failed is left out until it is announced again as another
process; one whose announcement is withdrawn gets nothing new. Pure: no clients, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from areal_lite.servers.registry import ServerInfo


def least_loaded(servers: Iterable[ServerInfo], load: Mapping[str, int]) -> ServerInfo | None:
    """The server with the fewest trajectories in flight per tensor-parallel rank (then by name); None when there is none."""
    return min(servers, key=lambda s: (load[s.name] / s.tensor_parallel, s.name), default=None)


class Router:
    """Servers by name, the version that each one holds, and how many trajectories it has in flight. `version` is the trainer's."""

    def __init__(self) -> None:
        self.version = 0
        self.servers: dict[str, ServerInfo] = {}
        self.load: Counter[str] = Counter()
        self._versions: dict[ServerInfo, int] = {}  # those that said so, or took a push
        self._failed: set[ServerInfo] = set()

    def update_servers(self, announced: Iterable[ServerInfo]) -> list[ServerInfo]:
        """Take over the list of announced servers, except processes that have failed. Returns the new ones: not ready yet."""
        current = {s.name: s for s in announced if s not in self._failed}
        new = [s for name, s in current.items() if self.servers.get(name) != s]
        self.servers = current
        self._versions = {
            s: version for s, version in self._versions.items() if s in current.values()
        }
        return new

    def record_version(self, server: ServerInfo, version: int) -> None:
        """`server` says that it holds `version`. What a push has brought it to meanwhile counts more."""
        if self.servers.get(server.name) == server:
            self._versions.setdefault(server, version)

    def record_push(self, server: ServerInfo) -> None:
        """`server` took the trainer's version."""
        if self.servers.get(server.name) == server:
            self._versions[server] = self.version

    def mark_failed(self, server: ServerInfo) -> bool:
        """Leave `server` out. True if that was news."""
        self._failed.add(server)
        if self.servers.get(server.name) != server:
            return False
        del self.servers[server.name]
        self._versions.pop(server, None)
        return True

    @property
    def ready(self) -> set[str]:
        """The names of those that may take requests."""
        return {
            server.name for server, version in self._versions.items() if version == self.version
        }

    @property
    def stale(self) -> list[ServerInfo]:
        """Those that need a push before they may take requests, by name."""
        return sorted(
            (s for s, version in self._versions.items() if version != self.version),
            key=lambda s: s.name,
        )

    def is_ready(self, server: ServerInfo) -> bool:
        return self._versions.get(server) == self.version

    def choose(self, prefer: Iterable[ServerInfo] = ()) -> ServerInfo | None:
        """The least loaded of those in `prefer` that work, which hold a prefix already, else of all."""
        chosen = least_loaded(filter(self.is_ready, prefer), self.load)
        return chosen or least_loaded(filter(self.is_ready, self._versions), self.load)
