"""Every question to the trajectory store: the only SQL outside the modules that write it.

`store.py` says what the store holds. Readers open it while its run writes to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

from areal_lite.run_dir.store_format import (
    ADMISSION,
    NOT_KEPT,
    REMEDY,
    TOKENS,
    TRACE,
    WITH_ROUTES,
    WITH_TOKENS,
    StoreFile,
    checksum,
    decoded,
    from_row,
    unpack,
)
from areal_lite.trajectory import Group, GroupState, Trajectory

# Rows that are read at once into columns.
_CHUNK = 8192
_STATES = list(GroupState)

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

# The columns of a Chunk.
_COLUMNS = {
    "group": ("t.group_id", np.int64),
    "sample": ("t.sample_index", np.int32),
    "trace": ("t.trace_index", np.int32),
    "traces": (
        "(SELECT count(*) FROM trajectories e"
        " WHERE e.group_id = t.group_id AND e.sample_index = t.sample_index)",
        np.int64,
    ),
    "step": ("coalesce(g.step, -1)", np.int64),
    "reward": ("t.reward", np.float64),
    "truncated": ("t.finish_reason = 'length'", np.bool_),
    "prompt": ("t.n_prompt", np.int32),
    "tokens": ("t.n_tokens", np.int32),
    "oldest": ("coalesce(t.min_version, -1)", np.int32),
    "newest": ("coalesce(t.max_version, -1)", np.int32),
    "num_segments": ("t.num_segments", np.int32),
    "started": ("t.started_at", np.float64),
    "finished": ("t.finished_at", np.float64),
    "server": ("t.server", np.str_),
}
_EACH = """trajectories t LEFT JOIN groups g USING (group_id)
           ORDER BY t.group_id, t.sample_index, t.trace_index"""
_DRAWN = """draws g JOIN trajectories t USING (group_id, sample_index)
            ORDER BY g.step, g.draw, g.position, t.trace_index"""
_SEGMENTS = msgspec.json.Decoder(list[list[tuple[int, int, int]]])


GROUP_FAULTS = {
    "groups with more episodes than were asked for": """
        SELECT group_id FROM groups JOIN trajectories USING (group_id) WHERE trace_index = 0
        GROUP BY group_id HAVING count(*) > size""",
    "groups with an episode that lacks a trace": """
        SELECT DISTINCT group_id FROM trajectories GROUP BY group_id, sample_index
        HAVING max(trace_index) >= count(*)""",
}
DRAW_FAULTS = {
    "groups that were drawn from and lack trajectories": """
        SELECT DISTINCT group_id FROM draws LEFT JOIN trajectories t
        USING (group_id, sample_index) WHERE t.n_tokens IS NULL""",
    "groups with an episode that was drawn twice at once": """
        SELECT DISTINCT group_id FROM draws GROUP BY step, draw, group_id, sample_index
        HAVING count(*) > 1""",
    "steps with a draw from two prompts": """
        SELECT DISTINCT d.step + 1 FROM draws d JOIN groups USING (group_id)
        GROUP BY d.step, d.draw HAVING count(DISTINCT prompt_id) > 1""",
}


class DamagedGroup(ValueError):
    """A group that lacks a trajectory, or has a trajectory that contradicts its checksum."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The table of groups as columns, n of them, in the order of admission."""

    ids: np.ndarray  # int64 [n], as the others up to `kept`
    prompt: np.ndarray  # its index
    drawn: np.ndarray
    size: np.ndarray
    state: np.ndarray  # its place in GroupState; see `are`
    trajectories: np.ndarray  # -1 without any
    step: np.ndarray  # from 0; -1 without one
    kept: np.ndarray  # bytes of the tokens of its trajectories; -1 without any
    reason: np.ndarray  # bool [n], whether there is one
    admitted: np.ndarray  # float64 [n], wall-clock seconds
    finished: np.ndarray  # the same, NaN before
    damaged: np.ndarray  # bool [n], admissions that their checksum contradicts

    def are(self, state: GroupState) -> np.ndarray:
        """Tell which groups are in `state`, bool [n]."""
        return self.state == _STATES.index(state)

    def number(self, state: GroupState) -> int:
        """Return the number of groups in `state`."""
        return int(np.count_nonzero(self.are(state)))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some trajectories as columns, n of them with s segments."""

    columns: dict[str, np.ndarray]  # [n], by the names that were asked for, also as chunk[name]
    owner: np.ndarray  # int64 [s], the trajectory of each segment, an index below n
    version: np.ndarray  # int64 [s], as `start` and `end`, of the segments in order
    start: np.ndarray
    end: np.ndarray

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def sampled(self) -> np.ndarray:
        """Return the sampled tokens of each trajectory, int64 [n]."""
        return np.bincount(self.owner, self.end - self.start, len(self)).astype(np.int64)


def to_groups(rows: Iterable[Sequence[Any]] = ()) -> Groups:
    """Return the columns of rows that `RunReader.group_table` has selected."""
    flat = (value for row in rows for value in _numbers(row))
    table = np.fromiter(flat, np.float64).reshape(-1, 12).T
    columns = dict(zip((field.name for field in fields(Groups)), table))
    for name in columns:
        if name not in ("admitted", "finished"):
            dtype = bool if name in ("reason", "damaged") else np.int64
            columns[name] = columns[name].astype(dtype)
    return Groups(**columns)


def _numbers(row: Sequence[Any]) -> tuple[float, ...]:
    """Return the columns of Groups for a row of the table."""
    *admission, expected, state, trajectories, step, kept, reason, finished = row
    group_id, _, index, drawn, size, admitted = admission
    damaged = checksum(admission) != expected
    place, ended = _STATES.index(GroupState(state)), np.nan if finished is None else finished
    counts = (trajectories, step, kept)
    return (group_id, index, drawn, size, place, *counts, reason, admitted, ended, damaged)


def to_chunk(names: Sequence[str], rows: Sequence[Sequence[Any]] = ()) -> Chunk:
    """Return the columns of rows: the segments as JSON, then a value for each name."""
    segments, *values = zip(*rows) if rows else [()] * (1 + len(names))
    found: list[Any] = _SEGMENTS.decode(f"[{','.join(segments)}]")
    lengths = np.array([len(own) for own in found], np.int64)
    flat = np.array([part for own in found for part in own], np.int64).reshape(-1, 3)
    return Chunk(
        columns={name: np.array(column, _COLUMNS[name][1]) for name, column in zip(names, values)},
        owner=np.repeat(np.arange(len(lengths)), lengths),
        version=flat[:, 0],
        start=flat[:, 1],
        end=flat[:, 2],
    )


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
            SELECT coalesce(sum(reason LIKE 'overdue%'), 0),
                   coalesce(sum(reason LIKE 'empty:%'), 0),
                   coalesce(sum(CASE WHEN reason LIKE 'empty:%' THEN size
                                     WHEN num_trajectories IS NOT NULL THEN size - episodes END), 0)
            FROM groups LEFT JOIN (SELECT group_id, count(*) AS episodes FROM trajectories
                                   WHERE trace_index = 0 GROUP BY group_id) USING (group_id)
        """
        names = ("dropped_groups", "empty_groups", "failed_rollouts")
        return dict(zip(names, next(self._query(query))))

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

    def samples(self, group_id: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield tokens, int32 [L], and log-probs, float32 [L], of the group's kept trajectories."""
        for length, tokens, logprobs in self._query(
            f"SELECT n_tokens, tokens, logprobs FROM trajectories JOIN sequences USING ({TRACE}) "
            "WHERE group_id = ? ORDER BY sample_index, trace_index",
            (group_id,),
        ):
            yield unpack(tokens, np.int32, length), unpack(logprobs, np.float32, length)

    def rows_to_check(self) -> Iterator[dict[str, Any]]:
        """Yield each trajectory with its routes, packed, as `check_sums` and `from_row` take it."""
        yield from self._rows(f"SELECT {WITH_ROUTES} FROM trajectories {TOKENS} ORDER BY {TRACE}")

    def group_table(self) -> Groups:
        """Return all groups as columns, about 100 bytes each."""
        query = (
            f"SELECT {', '.join(ADMISSION)}, checksum, state, coalesce(num_trajectories, -1), "
            "coalesce(step, -1), coalesce(kept_bytes, -1), reason IS NOT NULL, finished_at "
            "FROM groups ORDER BY group_id"
        )
        return to_groups(self._query(query))

    def chunks(self, names: Sequence[str], drawn: bool = False) -> Iterator[Chunk]:
        """Yield all trajectories as columns, some at a time, by group, sample and trace.

        With `drawn`: each draw of a trajectory from a replay buffer, with the draw's `step`.
        """
        columns = ", ".join(["t.segments", *(_COLUMNS[name][0] for name in names)])
        with self._explained():
            cursor = self._db.execute(f"SELECT {columns} FROM {_DRAWN if drawn else _EACH}")
            while rows := cursor.fetchmany(_CHUNK):
                yield to_chunk(names, rows)

    def solved_shares(self) -> Iterator[tuple[int, float]]:
        """Yield the prompt index of each group, and its share of positive rewards."""
        return self._query(
            "SELECT prompt_index, avg(reward > 0) FROM groups JOIN trajectories USING (group_id) "
            "GROUP BY group_id"
        )

    def faulty(self, faults: Mapping[str, str]) -> Iterator[tuple[str, list[int]]]:
        """Yield each of GROUP_FAULTS or DRAW_FAULTS, and the groups or steps that have it."""
        for name, query in faults.items():
            yield name, [value for (value,) in self._query(query)]

    def kept_trajectories(self) -> np.ndarray:
        """Return each group with tokens and the number of its trajectories with them, [n, 2]."""
        query = "SELECT group_id, count(*) FROM sequences GROUP BY group_id"
        return np.array(list(self._query(query)), np.int64).reshape(-1, 2)

    def draw_counts(self) -> dict[int, tuple[int, int]]:
        """Return by step the groups and the episodes that it drew from the replay buffer."""
        query = "SELECT step, count(DISTINCT draw), count(*) FROM draws GROUP BY step"
        return {step: (groups, episodes) for step, groups, episodes in self._query(query)}

    def first_draws(self) -> dict[int, int]:
        """Return by group the first step that drew it."""
        return dict(self._query("SELECT group_id, min(step) FROM draws GROUP BY group_id"))

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

    def used_groups(self, step: int) -> list[Group]:
        """Return the groups that `step` used. Raises ValueError if their tokens are not kept."""
        return self._groups("state = 'used' AND step = ?", step)

    def drawn(self, step: int) -> list[list[list[Trajectory]]]:
        """Return the episodes of each group that `step` drew from the replay buffer, in order.

        Raises ValueError if their tokens are not kept.
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
