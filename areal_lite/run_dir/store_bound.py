"""The bound of the store: groups that nothing needs lose their tokens.

* First those of which nothing was learned: a filter left them out, or they became too stale. Then
  those that steps have used and those with failed rollouts: they show what the model learned from
  and what goes wrong. The oldest go first among both.
* A group loses tokens, log-probs, texts and routes of all its trajectories in one transaction, and
  its `kept_bytes` becomes 0. Its other columns stay, so what the audit proves stays provable.
* Never removed: what waits for the trainer, what a replay buffer holds, and what steps have used
  that a resume may take back.
* New groups fill the pages that become free. What is left beyond the bound returns to the file
  system (`auto_vacuum = INCREMENTAL`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store_file import StoreFile

# A call removes or returns about this many bytes, so that other calls do not wait for long.
_BYTES_AT_ONCE = 8 * 2**20
# At the bound, groups are removed down to this share of it. The room is for the next steps: without
# it, each step would move pages to the end of the file and back.
_TARGET = 0.9

_REMOVABLE = """
SELECT group_id, kept_bytes, finished_at FROM groups
WHERE kept_bytes > 0 AND finished_at >= ?
  AND (state = 'used' OR num_trajectories < size) = ?
  AND NOT (state = 'used' AND step >= ?)
  AND CASE WHEN ? IS NULL THEN state != 'finished'
           ELSE group_id NOT IN (SELECT value FROM json_each(?)) END
ORDER BY finished_at
"""


class BoundedStore(RunReader):
    """The part of a store that keeps its file small."""

    # Groups that ended before this time, and of which nothing was learned, have lost their tokens.
    _unlearned_since = 0.0

    def __init__(self, path: Path):
        """Open the store to write, and create it if there is none."""
        StoreFile.__init__(self, path)

    def size(self, group_ids: Sequence[int]) -> dict[str, float]:
        """Return the metrics of the store's size; those per token are of some groups.

        The tokens are those of prompt and completion.
        """
        ids = (msgspec.json.encode(list(group_ids)).decode(),)
        chosen = "WHERE group_id IN (SELECT value FROM json_each(?))"
        ((kept,),) = self._query(f"SELECT sum(kept_bytes) FROM groups {chosen}", ids)
        ((tokens,),) = self._query(f"SELECT sum(n_tokens) FROM trajectories {chosen}", ids)
        size = {"store_mib": self._pragma("page_count") * self._pragma("page_size") / 2**20}
        return size | ({"store_bytes_per_token": kept / tokens} if tokens else {})

    def trim(self, max_bytes: int, since: int, held: Sequence[int] | None = None) -> bool:
        """Bring a file of more than `max_bytes` nearer to it; return whether another call may.

        Args:
            max_bytes: the bound of the file, without its write-ahead log.
            since: a resume may need what this step and later ones have used.
            held: ids of the groups of a replay buffer; None without one: what waits is needed.
        """
        page, pages = self._pragma("page_size"), self._pragma("page_count")
        if page * pages <= max_bytes:
            return False
        free = self._pragma("freelist_count")
        surplus = page * (pages - free) - int(_TARGET * max_bytes)
        if surplus > 0 and self._remove(min(surplus, _BYTES_AT_ONCE), since, held):
            return True
        spare, at_once = min(free, pages - max_bytes // page), _BYTES_AT_ONCE // page
        for _ in range(min(spare, at_once)):
            # Python ends a statement without columns after its first step, which is one page.
            self._execute("PRAGMA incremental_vacuum(1)")
        return spare > at_once

    def _remove(self, num_bytes: int, since: int, held: Sequence[int] | None) -> bool:
        """Remove the tokens of groups with `num_bytes` or more; return whether there were any."""
        ids = None if held is None else msgspec.json.encode(list(held)).decode()
        chosen: list[int] = []
        for learned in (False, True):
            # A group may leave a replay buffer long after it has ended.
            first = self._unlearned_since if held is None and not learned else 0.0
            for group_id, kept, ended in self._query(_REMOVABLE, (first, learned, since, ids, ids)):
                if num_bytes <= 0:
                    break
                chosen.append(group_id)
                num_bytes -= kept
                if not learned:
                    self._unlearned_since = ended
        where = "WHERE group_id IN (SELECT value FROM json_each(?))"
        values = (msgspec.json.encode(chosen).decode(),)
        self._execute(f"DELETE FROM sequences {where}", values)
        self._execute(f"UPDATE groups SET kept_bytes = 0 {where}", values)
        return bool(chosen)

    def _pragma(self, name: str) -> Any:
        ((value,),) = self._query(f"PRAGMA {name}")
        return value
