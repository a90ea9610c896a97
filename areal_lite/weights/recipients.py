"""The servers of one push, and the pause window in which they take the weights."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from areal_lite.config import SyncConfig
from areal_lite.servers.blocking import post_each
from areal_lite.servers.client import ServerError, ServersFailed
from areal_lite.servers.registry import ServerInfo
from areal_lite.sglang_plugins.weight_group import CollectiveError
from areal_lite.system import heartbeat
from areal_lite.system.processes import steady_time
from areal_lite.trajectory import InterruptMode
from areal_lite.weights.turns import KV_CACHE, WEIGHTS

log = logging.getLogger(__name__)

Bucket = list[tuple[str, torch.Tensor]]
"""Weights by name, as the model's Hugging Face checkpoint has them."""
FROM_DISK = "/update_weights_from_disk"


@dataclass(kw_only=True)
class PushReport:
    """The cost of a push."""

    version: int
    paused_at: float = 0.0  # wall-clock seconds; 0: not yet
    pause_s: float = 0.0  # length of the pause window, in which a server produces no token
    total_s: float = 0.0
    megabytes: float = 0.0  # MiB of weights
    drained: int = 0  # requests in flight that the controller waited for (interrupt mode `none`)
    drain_s: float = 0.0
    verified: int = 0  # tensors that were read back and compared
    failed: list[str] = field(default_factory=list)  # the servers that left the push


@dataclass
class PushRecipients:
    """The servers that take part in a push.

    Exactly the servers that fail leave. They stay paused: their weights may be half new.
    """

    servers: list[ServerInfo]
    report: PushReport
    sync: SyncConfig
    interrupt: str = InterruptMode.IN_PLACE
    parked: bool = False  # the servers may have given back the memory of weights and KV cache
    errors: list[ServerError] = field(default_factory=list)  # of the servers that left

    @property
    def names(self) -> str:
        return ", ".join(server.name for server in self.servers) or "no server"

    def post(
        self,
        path: str,
        body: dict[str, Any],
        timeout_s: float | None = None,
        to: list[ServerInfo] | None = None,
    ) -> None:
        """POST `body` once to every server, or `to` some of them."""
        servers = self.servers if to is None else to
        self._remove(post_each(servers, path, body, timeout_s or self.sync.timeout_s))

    @property
    def flush_cache(self) -> bool:
        """Return whether servers empty their KV cache. Under running requests that kills them."""
        return self.interrupt != InterruptMode.IN_PLACE

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the servers inside the block, the pause window. Errors resume them, too."""
        # Mode `none` has nothing in flight. The modes then differ only in the cache flush.
        mode = InterruptMode.RETRACT if self.interrupt == InterruptMode.NONE else self.interrupt
        # A server has no reason to be slow before the pause. One that hangs must not hold up the
        # others for as long as a transfer may take.
        timeout_s = self.sync.health_timeout_s
        self.report.paused_at = self.report.paused_at or steady_time()
        self.post("/pause_generation", {"mode": mode}, timeout_s)
        try:
            self._wake(WEIGHTS)
            yield
            self._wake(KV_CACHE)
        finally:
            # What the server gave back to the driver here, it would allocate at the next push.
            self.post("/continue_generation", {"torch_empty_cache": False}, timeout_s)
            self.report.pause_s = steady_time() - self.report.paused_at

    def _wake(self, memory: str) -> None:
        """Let servers take back what they gave to the trainer. One that fails stays paused."""
        if self.parked:
            self.post("/resume_memory_occupation", {"tags": [memory]})

    def run_together(self, action: Callable[[list[ServerInfo]], object]) -> None:
        """Run `action` with all servers, and again without the failed servers, until it succeeds.

        `action` raises ServersFailed or CollectiveError, and may be repeated. If no server is to
        blame, a connection may have broken, perhaps long before: it runs once more with the same
        servers.
        """
        broken = False
        while self.servers:
            heartbeat.beat()
            try:
                action(list(self.servers))
                return
            except ServersFailed as failed:
                self._remove(failed.errors)
            except CollectiveError as error:
                if broken:
                    raise
                broken = True
                log.warning("the push of version %d tries again: %s", self.report.version, error)

    def sum_each(self, count: Callable[[ServerInfo], int]) -> int:
        total = 0
        for server in list(self.servers):
            try:
                total += count(server)
            except ServerError as error:
                self._remove([error])
        return total

    def _remove(self, errors: list[ServerError]) -> None:
        self.errors += errors
        for error in errors:
            log.warning("the push of version %d continues without %s", self.report.version, error)
            self.report.failed.append(error.server.name)
        self.servers = [server for server in self.servers if server.name not in self.report.failed]
