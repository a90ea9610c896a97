"""Adaptive concurrency: keep as many trajectories in flight as the servers can run.

With too few, a server has a free slot and no prompt for it. With too many, requests wait in a
server's queue, where they are bound to that server; with a full KV cache the server also retracts
running requests. How many a server can run depends on the lengths of its sequences, and so changes
while a policy learns. The servers report it (`GET /v1/loads`, which SGLang answers from shared
memory without asking its scheduler):

    requests wait, or the KV cache is nearly full    the servers are full: limit = running + target
    else, if the limit holds generation back         the limit grows by a tenth

The target is a short queue: a tenth of the running requests, and at least one group. The limit
falls at once and rises within seconds. It starts at its cap, `rollout.max_concurrent`.

No client and no clock here.
"""

import math
from collections.abc import Sequence

from areal_lite.servers.client import ServerLoad

# Queue target as a share of the running requests, and growth of the limit.
_SHARE = 0.1

# Share of the KV cache. Near 1 SGLang starts to retract requests.
_FULL = 0.95


class Concurrency:
    """The limit of the trajectories in flight over all servers, in `limit`.

    It stays between one group and `cap`.
    """

    def __init__(self, cap: int, group_size: int):
        self.limit = cap
        self._cap = cap
        self._group_size = group_size

    def observe(self, loads: Sequence[ServerLoad], in_flight: int) -> None:
        """Adjust the limit to the loads of all servers and the trajectories in flight."""
        running = sum(load.running for load in loads)
        waiting = sum(load.waiting for load in loads)
        target = max(self._group_size, math.ceil(_SHARE * running))
        if waiting > target or any(load.cache_used > _FULL for load in loads):
            self.limit = min(self.limit, running + target)
        elif in_flight + self._group_size > self.limit and not waiting:
            self.limit += max(self._group_size, math.ceil(_SHARE * self.limit))
        self.limit = max(self._group_size, min(self.limit, self._cap))
