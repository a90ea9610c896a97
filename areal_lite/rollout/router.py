"""Which server a request goes to: the least loaded one that works and has the trainer's weights.

A server that failed is left out until it is announced again as another process. One that joins late may have older weights than the
trajectories in flight: it takes requests once it has the trainer's version, which the next push sees to. Pure: no clients, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from areal_lite.rollout.server import ServerInfo


def least_loaded(servers: Iterable[ServerInfo], load: Mapping[str, int]) -> ServerInfo | None:
    """The server with the fewest trajectories in flight per tensor-parallel rank (then by name); None when there is none."""
    return min(servers, key=lambda s: (load[s.name] / s.tensor_parallel, s.name), default=None)


class Router:
    """Servers by name, those that may take requests, and how many trajectories each one has in flight."""

    def __init__(self) -> None:
        self.servers: dict[str, ServerInfo] = {}
        self.ready: set[str] = set()
        self.load: Counter[str] = Counter()
        self._failed: set[ServerInfo] = set()

    def announce(self, announced: Iterable[ServerInfo]) -> list[ServerInfo]:
        """Take over the list of announced servers, except processes that have failed. Returns the new ones: not ready yet."""
        current = {s.name: s for s in announced if s not in self._failed}
        new = [s for name, s in current.items() if self.servers.get(name) != s]
        self.ready -= {name for name in self.ready if name not in current} | {s.name for s in new}
        self.servers = current
        return new

    def mark_ready(self, server: ServerInfo) -> None:
        """`server` has the trainer's version."""
        if self.servers.get(server.name) == server:
            self.ready.add(server.name)

    def fail(self, server: ServerInfo) -> bool:
        """Leave `server` out. True if that was news."""
        self._failed.add(server)
        if self.servers.get(server.name) != server:
            return False
        del self.servers[server.name]
        self.ready.discard(server.name)
        return True

    def works(self, server: ServerInfo) -> bool:
        return server.name in self.ready and self.servers[server.name] == server

    def pick(self) -> ServerInfo | None:
        return least_loaded((self.servers[name] for name in self.ready), self.load)

    @property
    def all_failed(self) -> bool:
        """Servers failed, and none is left that has the trainer's weights; without a batch there is no push that could bring one up to them."""
        return bool(self._failed) and not self.ready
