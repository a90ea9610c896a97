"""The trajectory store as columns, and what proves that it is whole: for reports and the audit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store_format import ADMISSION, TOKENS, TRACE, WITH_ROUTES, checksum
from areal_lite.trajectory import GroupState, trace_name

# Rows that are read at once into columns.
_ROWS = 8192
_Rows = Sequence[Sequence[Any]]

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


def _stored(column: str, dtype: Any) -> Any:
    """Make a field that the store has: how SQL reads it, and the dtype of its array."""
    return field(metadata={"column": column, "dtype": dtype})


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The table of groups as columns, in the order of admission. -1 stands for none."""

    ids: np.ndarray = _stored("group_id", np.int64)
    prompt: np.ndarray = _stored("prompt_index", np.int64)
    drawn: np.ndarray = _stored("drawn", np.int64)
    state: np.ndarray = _stored("state", np.str_)
    trajectories: np.ndarray = _stored("coalesce(num_trajectories, -1)", np.int64)
    step: np.ndarray = _stored("coalesce(step, -1)", np.int64)  # from 0
    kept: np.ndarray = _stored("coalesce(kept_bytes, -1)", np.int64)  # of its tokens
    has_reason: np.ndarray = _stored("reason IS NOT NULL", np.bool_)
    # wall-clock seconds, NaN before
    admitted: np.ndarray = _stored("admitted_at", np.float64)
    finished: np.ndarray = _stored("finished_at", np.float64)
    # admissions that their checksum contradicts
    damaged: np.ndarray = _stored(f"checksum_of({', '.join(ADMISSION)}) != checksum", np.bool_)

    def are(self, state: GroupState) -> np.ndarray:
        """Tell which groups are in `state`, bool [n]."""
        return self.state == state.value

    def number(self, state: GroupState) -> int:
        """Return the number of groups in `state`."""
        return int(np.count_nonzero(self.are(state)))


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Trajectories as columns, n of them with s segments, by group, sample and trace index.

    -1 stands for none.
    """

    group: np.ndarray = _stored("t.group_id", np.int64)
    sample: np.ndarray = _stored("t.sample_index", np.int32)
    trace: np.ndarray = _stored("t.trace_index", np.int32)
    step: np.ndarray = _stored("coalesce(g.step, -1)", np.int64)  # that used it, from 0
    reward: np.ndarray = _stored("t.reward", np.float64)  # NaN without one
    truncated: np.ndarray = _stored("t.finish_reason = 'length'", np.bool_)
    # tokens of the prompt, and of everything
    prompt: np.ndarray = _stored("t.n_prompt", np.int32)
    tokens: np.ndarray = _stored("t.n_tokens", np.int32)
    # weight versions of its first and last segment
    oldest: np.ndarray = _stored("coalesce(t.min_version, -1)", np.int32)
    newest: np.ndarray = _stored("coalesce(t.max_version, -1)", np.int32)
    num_segments: np.ndarray = _stored("t.num_segments", np.int32)
    # wall-clock seconds
    started: np.ndarray = _stored("t.started_at", np.float64)
    finished: np.ndarray = _stored("t.finished_at", np.float64)
    server: np.ndarray = _stored("t.server", np.str_)  # here int64, an index into `servers`
    servers: list[str]  # names, "servers" where the server is unknown
    owner: np.ndarray  # int64 [s], the trajectory of each segment, an index below n
    # version, start, end: int64 [s], weight version and tokens of the segments, in order
    version: np.ndarray
    start: np.ndarray
    end: np.ndarray
    groups: Groups

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

    @property
    def kept(self) -> np.ndarray:
        """Return whether the store has the tokens of each trajectory, bool [n]."""
        return self.groups.kept[np.searchsorted(self.groups.ids, self.group)] > 0

    def name(self, trajectory: int) -> str:
        """Return the name of a trajectory in its group."""
        return trace_name(int(self.sample[trajectory]), int(self.trace[trajectory]))

    def segments(self, trajectory: int) -> list[tuple[int, int]]:
        """Return (version, tokens) of each segment of a trajectory."""
        first, last = np.searchsorted(self.owner, [trajectory, trajectory + 1])
        return list(zip(self.version[first:last].tolist(), self.length[first:last].tolist()))


def to_columns(groups: Iterable[_Rows] = (), trajectories: Iterable[_Rows] = ()) -> Columns:
    """Return the columns of rows, which come in chunks.

    A row has the stored fields of Groups, or of Columns and its segments as JSON.
    """
    columns = _joined(map(_with_segments, chain([[]], trajectories)))
    columns["owner"] = np.repeat(np.arange(len(columns["group"])), columns["owner"])
    servers, columns["server"] = np.unique(columns["server"], return_inverse=True)
    return Columns(
        **columns,
        servers=[name or "servers" for name in servers.tolist()],
        groups=Groups(**_joined(_arrays(Groups, rows) for rows in chain([[]], groups))),
    )


def _with_segments(rows: _Rows) -> dict[str, np.ndarray]:
    """Return the columns of trajectories. `owner` has the number of segments of each."""
    found: list[Any] = _SEGMENTS.decode(f"[{','.join(row[-1] for row in rows)}]")
    flat = np.array([part for own in found for part in own], np.int64).reshape(-1, 3)
    return {
        **_arrays(Columns, rows),
        "owner": np.array([len(own) for own in found], np.int64),
        **dict(zip(("version", "start", "end"), flat.T)),
    }


def _stored_fields(table: type) -> list[Field]:
    return [one for one in fields(table) if one.metadata]


def _arrays(table: type, rows: _Rows) -> dict[str, np.ndarray]:
    columns = _stored_fields(table)
    values = zip(*rows) if rows else [()] * len(columns)
    return {one.name: np.array(own, one.metadata["dtype"]) for one, own in zip(columns, values)}


def _joined(parts: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    first, *others = parts
    return {name: np.concatenate([first[name], *(o[name] for o in others)]) for name in first}


class ColumnReader(RunReader):
    """A reader of whole tables. Every query sees the store as it was when this was made."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._execute("BEGIN")
        next(self._query("SELECT count(*) FROM sqlite_schema"))

    def rows_to_check(self) -> Iterator[dict[str, Any]]:
        """Yield each trajectory with its routes, packed, as `check_sums` and `from_row` take it."""
        yield from self._rows(f"SELECT {WITH_ROUTES} FROM trajectories {TOKENS} ORDER BY {TRACE}")

    def columns(self, drawn: bool = False) -> Columns:
        """Return all groups and trajectories as columns, about 100 and 150 bytes each.

        With `drawn`: each draw of a trajectory from a replay buffer, in order, with its `step`.
        """
        self._db.create_function("checksum_of", len(ADMISSION), lambda *row: checksum(row))
        groups = self._chunks(Groups, "groups ORDER BY group_id")
        trajectories = self._chunks(Columns, _DRAWN if drawn else _EACH, ", t.segments")
        return to_columns(groups, trajectories)

    def _chunks(self, table: type, source: str, more: str = "") -> Iterator[_Rows]:
        """Yield the stored fields of a table, and `more` columns, many rows at once."""
        names = ", ".join(one.metadata["column"] for one in _stored_fields(table))
        with self._explained():
            cursor = self._db.execute(f"SELECT {names}{more} FROM {source}")
            yield from iter(lambda: cursor.fetchmany(_ROWS), [])

    def solved_shares(self) -> Iterator[tuple[int, float]]:
        """Yield the prompt index of each group, and its share of positive rewards."""
        joined = "groups JOIN trajectories USING (group_id)"
        return self._query(f"SELECT prompt_index, avg(reward > 0) FROM {joined} GROUP BY group_id")

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


def open_columns(path: Path) -> AbstractContextManager[ColumnReader | None]:
    """Open the store at `path`, as it is at this moment, until the block ends; None without one."""
    return closing(ColumnReader(path)) if path.exists() else nullcontext()
