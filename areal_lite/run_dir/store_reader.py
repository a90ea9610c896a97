"""Queries of the trajectory store. `store.py` says what is in it and changes it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from areal_lite.run_dir.store_file import REMEDY, StoreFile
from areal_lite.run_dir.store_rows import decoded, from_row
from areal_lite.run_dir.store_schema import NOT_KEPT, TOKENS, TRACE, WITH_ROUTES, WITH_TOKENS
from areal_lite.trajectory import Group, GroupState, Trajectory


class DamagedGroup(ValueError):
    """A group without all of its trajectories, or with one that its checksum contradicts."""


class StoreReader(StoreFile):
    """The queries of a store, for one thread at a time."""

    def rewards(self) -> Iterator[tuple[int, list[float], int]]:
        """Yield the prompt index of each group that was not dropped, in finishing order.

        With it come the rewards of its episodes, which are the means of those of their traces, and
        the number of draws when the group was admitted.
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
        """Count the trajectories that finished and used groups should have, but do not have.

        Anything but 0 is a bug.
        """
        ((missing,),) = self._query(
            "SELECT (SELECT coalesce(sum(num_trajectories), 0) FROM groups "
            "        WHERE state IN ('finished', 'used')) - "
            "       (SELECT count(*) FROM trajectories JOIN groups USING (group_id) "
            "        WHERE state IN ('finished', 'used'))"
        )
        return missing

    def totals(self) -> dict[str, int]:
        """Return what `Store.set_totals` has set."""
        return dict(self._query("SELECT name, value FROM totals"))

    def filtered(self) -> Counter[str]:
        """Count the filtered groups by reason."""
        query = "SELECT reason, count(*) FROM groups WHERE state = 'filtered' GROUP BY reason"
        return Counter(dict(self._query(query)))

    def failures(self) -> dict[str, int]:
        """Count, over the whole run, the groups and rollouts that ended without use."""
        query = """
            SELECT coalesce(sum(reason LIKE 'overdue%'), 0),
                   coalesce(sum(reason LIKE 'empty:%'), 0),
                   coalesce(sum(CASE WHEN reason LIKE 'empty:%' THEN size
                                     WHEN num_trajectories IS NOT NULL THEN size - episodes END), 0)
            FROM groups LEFT JOIN (SELECT group_id, count(*) AS episodes FROM trajectories
                                   WHERE trace_index = 0 GROUP BY group_id) USING (group_id)
        """
        names = ("dropped_groups", "empty_groups", "failed_rollouts")
        return dict(zip(names, next(self._query(query))))

    def overdue_lengths(self) -> list[int]:
        """Return the sampled tokens of the longest trajectory of each group dropped as overdue."""
        sampled = (
            "SELECT sum(json_extract(value, '$[2]') - json_extract(value, '$[1]')) "
            "FROM json_each(segments)"
        )
        query = f"""
            SELECT max(({sampled})) FROM trajectories WHERE group_id IN
            (SELECT group_id FROM groups WHERE state = 'dropped' AND reason LIKE 'overdue%')
            GROUP BY group_id
        """
        return [longest for (longest,) in self._query(query)]

    def groups(self) -> Iterator[dict[str, Any]]:
        """Yield the row of each group as a dict, in the order of admission."""
        yield from self._rows("SELECT * FROM groups ORDER BY group_id")

    def trajectories(self, state: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield each trajectory by group, sample and trace, of groups in `state` or of all.

        A trajectory is a dict as `decoded` returns it, with its group's state, step and prompt_id.
        """
        where, values = ("WHERE state = ?", (state,)) if state else ("", ())
        for row in self._rows(
            f"SELECT {WITH_TOKENS}, state, step, prompt_id "
            f"FROM trajectories {TOKENS} JOIN groups USING (group_id) {where} "
            f"ORDER BY {TRACE}",
            values,
        ):
            yield decoded(row)

    def finished_groups(self) -> Iterator[tuple[Group, bool]]:
        """Yield each finished or used group and whether it was used, in finishing order.

        Groups whose tokens are not kept are left out.
        """
        yield from self._select(
            "state IN ('finished', 'used') AND kept_bytes > 0 ORDER BY finished_at, group_id"
        )

    def waiting_groups(self) -> list[Group]:
        """Return the finished groups that no step has, in the order of admission.

        Raises DamagedGroup, also for one whose tokens were removed although it waits.
        """
        where = "state = 'finished' AND step IS NULL ORDER BY group_id"
        return [group for group, _ in self._select(where)]

    def assigned_groups(self, step: int) -> list[Group]:
        """Return the batch of `step`, if it is assigned and its end is not recorded.

        The groups are in the order of admission. Raises DamagedGroup.
        """
        where = "state = 'finished' AND step = ? ORDER BY group_id"
        return [group for group, _ in self._select(where, (step,))]

    def completed_steps(self) -> int:
        """Return the number of training steps whose end is recorded. Not for a replay buffer."""
        ((steps,),) = self._query("SELECT max(step) + 1 FROM groups WHERE state = 'used'")
        return steps or 0

    def used_groups(self, step: int) -> list[Group]:
        """Return the groups that `step` used, in the order of admission.

        Raises DamagedGroup, and ValueError if their tokens are not kept.
        """
        where = "state = 'used' AND step = ? ORDER BY group_id"
        return [group for group, _ in self._select(where, (step,))]

    def drawn(self, step: int) -> list[list[list[Trajectory]]]:
        """Return the episodes of each group that `step` drew from the replay buffer, in order.

        Raises DamagedGroup, and ValueError if their tokens are not kept.
        """
        drawn: dict[int, dict[int, list[Trajectory]]] = {}
        for row in self._rows(
            f"SELECT {WITH_ROUTES}, draw, position, prompt_id, state, kept_bytes "
            f"FROM draws JOIN trajectories USING (group_id, sample_index) {TOKENS} "
            "JOIN groups USING (group_id) WHERE draws.step = ? "
            "ORDER BY draw, position, trace_index",
            (step,),
        ):
            self._check_kept(row)
            trajectory = self._trajectory(row, row["prompt_id"])
            drawn.setdefault(row["draw"], {}).setdefault(row["position"], []).append(trajectory)
        return [list(episodes.values()) for episodes in drawn.values()]

    def last_step_without_tokens(self, steps: int) -> int | None:
        """Return the last of the first `steps` steps whose tokens are not all kept, or None."""
        ((last,),) = self._query(
            "SELECT max(step) FROM (SELECT step, kept_bytes FROM groups WHERE state = 'used' "
            "UNION ALL SELECT draws.step, kept_bytes FROM draws JOIN groups USING (group_id)) "
            "WHERE kept_bytes = 0 AND step < ?",
            (steps,),
        )
        return last

    def _select(self, where: str, values: Sequence[Any] = ()) -> Iterator[tuple[Group, bool]]:
        for row in self._rows(f"SELECT * FROM groups WHERE {where}", values):
            yield self._group(row), row["state"] == GroupState.USED

    def _group(self, row: dict[str, Any]) -> Group:
        """Return the group of a row of `groups`.

        Raises DamagedGroup, and ValueError if its tokens are not kept.
        """
        self._check_kept(row)
        rows = list(
            self._rows(
                f"SELECT {WITH_ROUTES} FROM trajectories {TOKENS} WHERE group_id = ? "
                "ORDER BY sample_index, trace_index",
                (row["group_id"],),
            )
        )
        if len(rows) != row["num_trajectories"]:
            reason = f"group {row['group_id']} has {len(rows)} trajectories"
            raise DamagedGroup(f"{self._path}: {reason}, not {row['num_trajectories']}: {REMEDY}")
        trajectories = [self._trajectory(t, row["prompt_id"]) for t in rows]
        return Group(
            group_id=row["group_id"],
            prompt_id=row["prompt_id"],
            size=row["size"],
            trajectories=trajectories,
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
