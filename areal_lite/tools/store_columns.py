"""The trajectory store as columns, and what proves that it is whole: for reports and the audit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store_format import ADMISSION, TOKENS, TRACE, WITH_ROUTES, checksum
from areal_lite.trajectory import GroupState

# Rows that are read at once into columns.
_ROWS = 8192
_STATES = list(GroupState)

# The columns of a Table that the store has: how it writes them, and the dtype.
_COLUMNS = {
    "group": ("t.group_id", np.int64),
    "sample": ("t.sample_index", np.int32),
    "trace": ("t.trace_index", np.int32),
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
class Table:
    """Trajectories as columns, n of them with s segments, by group, sample and trace index."""

    # group, sample, trace: int64 or int32 [n], group id, sample index and trace index
    group: np.ndarray
    sample: np.ndarray
    trace: np.ndarray
    step: np.ndarray  # int64 [n], the training step that used it, from 0; -1 for none
    reward: np.ndarray  # float64 [n], NaN without one
    truncated: np.ndarray  # bool [n]
    # prompt, tokens: int32 [n], tokens of the prompt and of everything
    prompt: np.ndarray
    tokens: np.ndarray
    # oldest, newest: int32 [n], the weight versions of its first and last segment, or -1
    oldest: np.ndarray
    newest: np.ndarray
    num_segments: np.ndarray  # int32 [n]
    # started, finished: float64 [n], wall-clock seconds
    started: np.ndarray
    finished: np.ndarray
    server: np.ndarray  # int64 [n], index into `servers`
    servers: list[str]  # names, "servers" where the server is unknown
    owner: np.ndarray  # int64 [s], the trajectory of each segment, an index below n
    # version, start, end: int64 [s], weight version and tokens of the segments, in order
    version: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    @cached_property
    def length(self) -> np.ndarray:
        """Return the number of tokens of each segment, int64 [s]."""
        return self.end - self.start

    @cached_property
    def sampled(self) -> np.ndarray:
        """Return the sampled tokens of each trajectory, int64 [n]."""
        return np.bincount(self.owner, self.length, len(self)).astype(np.int64)


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


def to_table(chunks: Iterable[Sequence[Sequence[Any]]] = ()) -> Table:
    """Return the columns of rows, given in chunks: values of _COLUMNS, then segments as JSON."""
    parts = [_part(rows) for rows in chain([[]], chunks)]
    firsts = np.cumsum([0, *(len(part["group"]) for part in parts)])
    for first, part in zip(firsts, parts):
        part["owner"] += first
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    servers, columns["server"] = np.unique(columns["server"], return_inverse=True)
    return Table(**columns, servers=[name or "servers" for name in servers.tolist()])


def _part(rows: Sequence[Sequence[Any]]) -> dict[str, np.ndarray]:
    *values, segments = zip(*rows) if rows else [()] * (len(_COLUMNS) + 1)
    found: list[Any] = _SEGMENTS.decode(f"[{','.join(segments)}]")
    lengths = np.array([len(own) for own in found], np.int64)
    flat = np.array([part for own in found for part in own], np.int64).reshape(-1, 3)
    columns = zip(_COLUMNS.items(), values, strict=True)
    return {
        **{name: np.array(column, dtype) for (name, (_, dtype)), column in columns},
        "owner": np.repeat(np.arange(len(lengths)), lengths),
        **dict(zip(("version", "start", "end"), flat.T)),
    }


class ColumnReader(RunReader):
    """A reader of whole tables."""

    def snapshot(self) -> None:
        """Begin a transaction: every query until `close` sees this moment."""
        self._execute("BEGIN")
        next(self._query("SELECT count(*) FROM sqlite_schema"))

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

    def table(self, drawn: bool = False) -> Table:
        """Return all trajectories as columns.

        With `drawn`: each draw of a trajectory from a replay buffer, in order, with its `step`.
        """
        columns = ", ".join(column for column, _ in _COLUMNS.values())
        source = _DRAWN if drawn else _EACH
        with self._explained():
            cursor = self._db.execute(f"SELECT {columns}, t.segments FROM {source}")
            return to_table(iter(lambda: cursor.fetchmany(_ROWS), []))

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
