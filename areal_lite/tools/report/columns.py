"""A run's store as columns: a number per trajectory, without tokens and text.

Columns take about 80 bytes a trajectory, so a run of a million fits in memory, and everything that
is counted for a page is an operation on whole arrays.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_lite.run_dir.store_file import REMEDY
from areal_lite.run_dir.store_schema import SCHEMA

# Rows that are read at once.
_CHUNK = 8192

_TRAJECTORIES = """
SELECT group_id, sample_index, trace_index, reward, finish_reason = 'length', n_prompt, n_tokens,
       started_at, finished_at, server, segments
FROM trajectories ORDER BY group_id, sample_index, trace_index
"""
_GROUPS = """
SELECT group_id, state, coalesce(step, -1), admitted_at, finished_at, prompt_index, drawn,
       coalesce(kept_bytes > 0, 0)
FROM groups ORDER BY group_id
"""
_DTYPES = (
    *(np.int64, np.int32, np.int32, np.float64, np.bool_, np.int32, np.int32),
    *(np.float64, np.float64),
)
_SEGMENTS = msgspec.json.Decoder(list[list[tuple[int, int, int]]])


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The trajectories of a store, in the order of group, sample and trace index: n of them.

    Args:
        group, sample, trace: int [n], group id, sample index and trace index.
        reward: float64 [n], NaN without one.
        truncated: bool [n].
        prompt, tokens: int32 [n], tokens of the prompt and of everything.
        started, finished: float64 [n], wall-clock seconds.
        server: int32 [n], index into `servers`.
        servers: names, "" where the server is unknown.
        step: int32 [n], the training step that used it, from 0; -1 for none.
        sampled: int64 [n], sampled tokens.
        owner: int64 [s], the trajectory of each segment.
        version, length: int64 [s], weight version and number of tokens of each segment.
        groups: columns of all groups: group_id, state, step, admitted, finished (NaN before),
            prompt_index, drawn, the prompts that were drawn up to this one, and kept, whether the
            store has the tokens of its trajectories.
    """

    group: np.ndarray
    sample: np.ndarray
    trace: np.ndarray
    reward: np.ndarray
    truncated: np.ndarray
    prompt: np.ndarray
    tokens: np.ndarray
    started: np.ndarray
    finished: np.ndarray
    server: np.ndarray
    servers: list[str]
    step: np.ndarray
    sampled: np.ndarray
    owner: np.ndarray
    version: np.ndarray
    length: np.ndarray
    groups: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.group)

    @property
    def kept(self) -> np.ndarray:
        """Return whether the store has the tokens of each trajectory, bool [n]."""
        return self.groups["kept"][np.searchsorted(self.groups["group_id"], self.group)]

    def segments(self, trajectory: int) -> list[tuple[int, int]]:
        """Return (version, tokens) of each segment of a trajectory."""
        first, last = np.searchsorted(self.owner, [trajectory, trajectory + 1])
        return list(zip(self.version[first:last].tolist(), self.length[first:last].tolist()))


@contextmanager
def open_store(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a store for reading, also while its run writes to it.

    Raises ValueError if there is none, if it is damaged, or if an older version of the package
    wrote it.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: give the directory of a training run")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            if not db.execute("PRAGMA table_info(sequences)").fetchall():
                raise ValueError(f"{path} is empty, or another version of the package wrote it")
            yield db
    except sqlite3.Error as error:
        raise ValueError(f"{path}: {error}: {REMEDY}") from error


def read_columns(path: Path) -> Columns:
    """Read the columns of the store at `path`, in one pass over each table.

    Without a store there are no trajectories: a run with debug=train_only has none.
    """
    with open_store(path) if path.exists() else _empty_store() as db:
        # One transaction: groups and trajectories of the same moment.
        db.execute("BEGIN")
        groups = _read_groups(db)
        parts, names, segments = _read_trajectories(db)
    group = parts[0]
    used = groups["step"][np.searchsorted(groups["group_id"], group)]
    servers, server = np.unique(np.array(names, np.str_), return_inverse=True)
    owner, version, length = segments
    return Columns(
        **dict(zip(("group", "sample", "trace", "reward", "truncated", "prompt", "tokens"), parts)),
        started=parts[7],
        finished=parts[8],
        server=server.astype(np.int32),
        servers=servers.tolist(),
        step=used.astype(np.int32),
        sampled=np.bincount(owner, length, len(group)).astype(np.int64),
        owner=owner,
        version=version,
        length=length,
        groups=groups,
    )


@contextmanager
def _empty_store() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        yield db


def _read_groups(db: sqlite3.Connection) -> dict[str, np.ndarray]:
    rows = db.execute(_GROUPS).fetchall()
    columns = list(zip(*rows)) or [()] * 8
    dtypes = {
        "group_id": np.int64,
        "state": np.str_,
        "step": np.int64,
        "admitted": np.float64,
        "finished": np.float64,
        "prompt_index": np.int64,
        "drawn": np.int64,
        "kept": np.bool_,
    }
    return {name: np.array(column, dtype) for (name, dtype), column in zip(dtypes.items(), columns)}


def _read_trajectories(
    db: sqlite3.Connection,
) -> tuple[list[np.ndarray], list[str], list[np.ndarray]]:
    """Return the numeric columns, the server of each row, and owner, version, length."""
    chunks: list[list[np.ndarray]] = []
    servers: list[str] = []
    segments: list[np.ndarray] = []
    cursor = db.execute(_TRAJECTORIES)
    while rows := cursor.fetchmany(_CHUNK):
        columns = list(zip(*rows))
        chunks.append([np.array(c, dtype) for c, dtype in zip(columns, _DTYPES)])
        decoded: list[Any] = _SEGMENTS.decode(f"[{','.join(columns[10])}]")
        flat = [
            (len(servers) + row, version, end - start)
            for row, found in enumerate(decoded)
            for version, start, end in found
        ]
        segments.append(np.array(flat, np.int64).reshape(-1, 3))
        servers.extend(columns[9])
    parts = [
        np.concatenate([chunk[i] for chunk in chunks]) if chunks else np.empty(0, dtype)
        for i, dtype in enumerate(_DTYPES)
    ]
    table = np.concatenate(segments) if segments else np.empty((0, 3), np.int64)
    return parts, servers, list(table.T)
