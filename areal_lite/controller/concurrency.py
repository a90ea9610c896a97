"""How many trajectories to keep in flight: as many as the servers can run, plus a short queue, whatever the size of a batch.

Too few, and a server has a free place and no prompt for it. Too many, and requests wait in a server's queue, where they are bound to that
server and cannot be moved; and with the KV cache full it throws running requests back. What a server can run depends on the lengths of
what it runs, and so changes while a policy learns. The servers say it themselves (`GET /v1/loads`, which SGLang answers from shared memory
without asking its scheduler):

    requests wait, or the KV cache is nearly full    the servers are full: limit = running + queue target
    else, if the limit is what holds us back         limit grows by a tenth

with a queue target of a tenth of what runs, and a group at least. So it follows down at once and up within seconds. Never above the hard
cap, `rollout.max_concurrent`, where it starts. Pure: no client, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from areal_lite.servers.answers import ServerLoad

_SHARE = 0.1  # queue target of what runs, and growth of the limit


_FULL = 0.95  # of the KV cache: SGLang begins to throw requests back near 1


class Concurrency:
    """`limit`: trajectories that may be in flight, over all servers; between one group and `cap`."""

    def __init__(self, cap: int, group_size: int):
        self.limit = self._cap = cap
        self._group_size = group_size

    def observe(self, loads: Sequence[ServerLoad], in_flight: int) -> None:
        """What all servers say now, and how many trajectories are in flight."""
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        target = max(self._group_size, math.ceil(_SHARE * running))
        if waiting > target or any(load.cache_used > _FULL for load in loads):
            self.limit = min(self.limit, running + target)
        elif in_flight + self._group_size > self.limit and not waiting:
            self.limit += max(self._group_size, math.ceil(_SHARE * self.limit))
        self.limit = max(self._group_size, min(self.limit, self._cap))
