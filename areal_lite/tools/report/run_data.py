"""The records in a run directory, read back. The run may be complete, still going or killed."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from omegaconf import OmegaConf

from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.paths import CONFIG_FILE, METRICS_FILE, STORE_FILE, SUMMARY_FILE
from areal_lite.run_dir.store_file import REMEDY
from areal_lite.run_dir.store_schema import SCHEMA

# The values of these keys are never shown.
_SECRET = re.compile(r"(api_)?key|token|password|secret", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The records of one run.

    `metrics` and `evals` hold lines in the order in which they were written. `config` is empty
    without a config.yaml.
    """

    run_dir: Path
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    config: dict[str, Any]
    columns: Columns
    ended: bool

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def staleness_bound(self) -> int | None:
        """Return the largest staleness of a trained token; None for a run with replay."""
        buffer = self.config.get("buffer", {})
        return None if buffer.get("replay", {}).get("capacity") else buffer.get("max_staleness")

    @property
    def batch_groups(self) -> int:
        return self.config.get("trainer", {}).get("batch_groups", 1)

    @property
    def steps_planned(self) -> int | None:
        return self.config.get("trainer", {}).get("steps")

    def series(self, key: str) -> np.ndarray:
        """Return `key` of each training step, float64 [steps], NaN where it is unknown."""
        return np.array([m.get(key) for m in self.metrics], np.float64)


def load_run(run_dir: Path) -> RunData:
    """Read all records that exist. Raises ValueError when `run_dir` is not a directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a run directory: there is no such folder")
    return RunData(
        run_dir=run_dir,
        metrics=read_metrics(run_dir),
        evals=read_events(run_dir, "evals"),
        config=read_run_config(run_dir),
        columns=read_columns(run_dir / STORE_FILE),
        ended=(run_dir / SUMMARY_FILE).exists(),
    )


def read_run(run_dir: Path) -> RunData:
    """Read the records of a run, as far as it got.

    Raises ValueError for a directory that is not that of a training run.
    """
    run_dir = Path(run_dir)
    if not any((run_dir / name).exists() for name in (CONFIG_FILE, METRICS_FILE, STORE_FILE)):
        raise ValueError(f"{run_dir} is not the directory of a training run: give one")
    return load_run(run_dir)


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Return the configuration of a run without keys and tokens; {} without a config.yaml."""
    if not (run_dir / CONFIG_FILE).exists():
        return {}
    return _public(OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG_FILE), resolve=False))


def _public(node: Any) -> Any:
    """Return the configuration without keys and tokens."""
    if isinstance(node, Mapping):
        return {
            str(key): _public(value)
            for key, value in node.items()
            if not (_SECRET.fullmatch(str(key)) and value is not None)
        }
    return [_public(value) for value in node] if isinstance(node, list) else node


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
