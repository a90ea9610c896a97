"""The queries of a run. tools/store_columns.py and tools/stored_run.py have queries about a run.

All other SQL is in store.py, which writes, and says what the store holds. Readers open it while
its run writes to it.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from areal_lite.run_dir.store_format import (
    NOT_KEPT,
    REMEDY,
    TOKENS,
    TRACE,
    WITH_ROUTES,
    WITH_TOKENS,
    StoreFile,
    decoded,
    from_row,
)
from areal_lite.trajectory import Group, GroupState, Trajectory

# The filters of `trajectories`.
_FILTERS = {
    "state": "state = :state",
    "group": "group_id = :group",
    "step": "step = :step",
    "version": "EXISTS (SELECT 1 FROM json_each(segments) "
    "WHERE json_extract(value, '$[0]') = :version)",
    "reward_min": "reward >= :reward_min",
    "reward_max": "reward <= :reward_max",
    "kept": "(tokens IS NOT NULL) = :kept",
}


class DamagedGroup(ValueError):
    """A group that lacks a trajectory, or has a trajectory that contradicts its checksum."""


class RunReader(StoreFile):
    """An open store to read, for one thread at a time. Every error of SQLite is a StoreError."""

    def rewards(self) -> Iterator[tuple[int, list[float], int]]:
        """Yield (prompt index, rewards, drawn) of each group not dropped, in finishing order.

        The reward of an episode is the mean of its traces'. `drawn` is as in `Store.admit`.
        """
        for index, rewards, drawn in self._query(
            "SELECT prompt_index, json_group_array(mean), drawn FROM groups JOIN "
            "(SELECT group_id, avg(reward) AS mean FROM trajectories "
            " GROUP BY group_id, sample_index) USING (group_id) WHERE state != 'dropped' "
            "GROUP BY group_id ORDER BY groups.finished_at, group_id"
        ):
            yield index, msgspec.json.decode(rewards), drawn

    def counts(self) -> dict[str, int]:
        """Count the groups in each state, zeros included."""
        found = dict(self._query("SELECT state, count(*) FROM groups GROUP BY state"))
        return {state.value: found.get(state, 0) for state in GroupState}

    def missing_trajectories(self) -> int:
        """Count the trajectories that finished and used groups lack. Anything but 0 is a bug."""
        ((missing,),) = self._query(
            "SELECT (SELECT coalesce(sum(num_trajectories), 0) FROM groups "
            "        WHERE state IN ('finished', 'used')) - "
            "       (SELECT count(*) FROM trajectories JOIN groups USING (group_id) "
            "        WHERE state IN ('finished', 'used'))"
        )
        return missing

    def totals(self) -> dict[str, int]:
        """Return the totals that `Store.set_totals` has set."""
        return dict(self._query("SELECT name, value FROM totals"))

    def filtered(self) -> Counter[str]:
        """Count the filtered groups by reason."""
        query = "SELECT reason, count(*) FROM groups WHERE state = 'filtered' GROUP BY reason"
        return Counter(dict(self._query(query)))

    def failures(self) -> dict[str, int]:
        """Count, over the whole run, the groups and rollouts that ended without use."""
        query = """
            SELECT coalesce(sum(reason LIKE 'empty:%'), 0),
                   coalesce(sum(CASE WHEN reason LIKE 'empty:%' THEN size
                                     WHEN num_trajectories IS NOT NULL THEN size - episodes END), 0)
            FROM groups LEFT JOIN (SELECT group_id, count(*) AS episodes FROM trajectories
                                   WHERE trace_index = 0 GROUP BY group_id) USING (group_id)
        """
        return dict(zip(("empty_groups", "failed_rollouts"), next(self._query(query))))

    def groups(self) -> Iterator[dict[str, Any]]:
        """Yield the row of each group as a dict, in the order of admission."""
        yield from self._rows("SELECT * FROM groups ORDER BY group_id")

    def trajectories(self, *, limit: int = -1, **filters: Any) -> Iterator[dict[str, Any]]:
        """Yield up to `limit` trajectories that pass all filters, by group, sample and trace.

        Each is a dict as `decoded` returns it, with its group's state, step and prompt_id.
        `filters` are by the names of _FILTERS; None lets everything pass.
        """
        source, values = _matching(filters)
        query = f"SELECT {WITH_TOKENS}, state, step, prompt_id {source} ORDER BY {TRACE}"
        for row in self._rows(f"{query} LIMIT :limit", {**values, "limit": limit}):
            yield decoded(row)

    def count_trajectories(self, **filters: Any) -> int:
        """Count the trajectories that pass all filters."""
        source, values = _matching(filters)
        ((number,),) = self._query(f"SELECT count(*) {source}", values)
        return number

    def finished_groups(self) -> Iterator[tuple[Group, bool]]:
        """Yield the kept groups that finished, and whether they were used, in finishing order."""
        where = "state IN ('finished', 'used') AND kept_bytes > 0 ORDER BY finished_at, group_id"
        for row in self._rows(f"SELECT * FROM groups WHERE {where}"):
            yield self._group(row), row["state"] == GroupState.USED

    def waiting_groups(self) -> list[Group]:
        """Return the finished groups that no step has. Raises DamagedGroup."""
        return self._groups("state = 'finished' AND step IS NULL")

    def assigned_groups(self, step: int) -> list[Group]:
        """Return the batch of `step`, if its end is not recorded. Raises DamagedGroup."""
        return self._groups("state = 'finished' AND step = ?", step)

    def completed_steps(self) -> int:
        """Return the number of training steps whose end is recorded. Not for a replay buffer."""
        ((steps,),) = self._query("SELECT max(step) + 1 FROM groups WHERE state = 'used'")
        return steps or 0

    def _groups(self, where: str, *values: Any) -> list[Group]:
        rows = self._rows(f"SELECT * FROM groups WHERE {where} ORDER BY group_id", values)
        return list(map(self._group, rows))

    def _group(self, row: dict[str, Any]) -> Group:
        """Return the group of a row. Raises DamagedGroup, or ValueError without its tokens."""
        self._check_kept(row)
        query = f"SELECT {WITH_ROUTES} FROM trajectories {TOKENS} WHERE group_id = ?"
        rows = list(self._rows(f"{query} ORDER BY sample_index, trace_index", (row["group_id"],)))
        if len(rows) != row["num_trajectories"]:
            reason = f"group {row['group_id']} has {len(rows)} trajectories"
            raise DamagedGroup(f"{self._path}: {reason}, not {row['num_trajectories']}: {REMEDY}")
        return Group(
            group_id=row["group_id"],
            prompt_id=row["prompt_id"],
            size=row["size"],
            trajectories=[self._trajectory(t, row["prompt_id"]) for t in rows],
            prompt_index=row["prompt_index"],
        )

    def _check_kept(self, row: dict[str, Any]) -> None:
        """Raise an error if the group of a row has lost its tokens: DamagedGroup if it waits."""
        if row["kept_bytes"] != 0:
            return
        text = f"{self._path}: group {row['group_id']}: {NOT_KEPT}"
        if row["state"] == GroupState.FINISHED:
            raise DamagedGroup(f"{text}, and it waits: {REMEDY}")
        raise ValueError(text)

    def _trajectory(self, row: dict[str, Any], prompt_id: str) -> Trajectory:
        """Return the trajectory of both its rows. Raises DamagedGroup."""
        try:
            return from_row(row, prompt_id)
        except ValueError as error:
            raise DamagedGroup(f"{self._path}: {error}: {REMEDY}") from error


def _matching(filters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the source of the trajectories that pass the filters, and the values in it."""
    values = {name: value for name, value in filters.items() if value is not None}
    where = " AND ".join(["1", *(_FILTERS[name] for name in values)])
    return f"FROM trajectories {TOKENS} JOIN groups USING (group_id) WHERE {where}", values
