"""The tables of the trajectory store, and the conversion of trajectories to rows and back.

Each row has a checksum. SQLite notices damage to its own structures only, and a flipped bit in a
blob, a reward or a prompt index would train on wrong data without a sign.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from areal_lite.trajectory import GroupState, Trajectory

SCHEMA = f"""
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY,
    prompt_id TEXT NOT NULL,
    prompt_index INTEGER NOT NULL,
    drawn INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ({", ".join(f"'{state}'" for state in GroupState)})),
    reason TEXT,
    size INTEGER NOT NULL,
    num_trajectories INTEGER,
    admitted_at REAL NOT NULL,
    finished_at REAL,
    step INTEGER,
    checksum INTEGER NOT NULL
) STRICT;
CREATE INDEX groups_by_state ON groups (state);
CREATE TABLE trajectories (
    group_id INTEGER NOT NULL REFERENCES groups,
    sample_index INTEGER NOT NULL,
    reward REAL,
    finish_reason TEXT NOT NULL,
    n_prompt INTEGER NOT NULL,
    n_tokens INTEGER NOT NULL,
    min_version INTEGER,
    max_version INTEGER,
    num_segments INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    kv_version INTEGER NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL,
    server TEXT NOT NULL,
    segments TEXT NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    versions BLOB NOT NULL,
    prompt TEXT,
    completion TEXT,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (group_id, sample_index)
) STRICT, WITHOUT ROWID;
CREATE TABLE draws (
    step INTEGER NOT NULL,
    draw INTEGER NOT NULL,
    position INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    PRIMARY KEY (step, draw, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE totals (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
"""


ADMISSION = ("group_id", "prompt_id", "prompt_index", "drawn", "size", "admitted_at")
"""The columns of `groups` that never change. The checksum is over these."""


def checksum(values: Sequence[Any]) -> int:
    """Return the CRC-32 of the values of a row."""
    return zlib.crc32(msgspec.msgpack.encode(values))


def from_row(row: dict[str, Any], prompt_id: str) -> Trajectory:
    """Return the trajectory of a row of `trajectories`. Raises ValueError for a damaged row."""
    *values, expected = row.values()
    if checksum(values) != expected:
        name = f"trajectory {row['group_id']}/{row['sample_index']}"
        raise ValueError(f"{name} is damaged: its checksum is wrong")
    versions = np.frombuffer(row["versions"], np.int32)
    return Trajectory(
        group_id=row["group_id"],
        prompt_id=prompt_id,
        sample_index=row["sample_index"],
        tokens=np.frombuffer(row["tokens"], np.int32),
        loss_mask=versions >= 0,
        behavior_logprobs=np.frombuffer(row["logprobs"], np.float32),
        versions=versions,
        finish_reason=row["finish_reason"],
        reward=row["reward"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        server=row["server"],
        requests=row["requests"],
        kv_version=row["kv_version"],
    ).check()


def to_row(t: Trajectory, prompt: str | None, completion: str | None) -> tuple[Any, ...]:
    """Return the columns of `trajectories` in their order."""
    segments = [[s.version, s.start, s.end] for s in t.segments]
    min_version, n_prompt, _ = segments[0] if segments else (None, len(t.tokens), None)
    max_version = segments[-1][0] if segments else None
    values = (
        t.group_id,
        t.sample_index,
        # SQLite has no negative zero.
        None if t.reward is None else float(t.reward) + 0.0,
        t.finish_reason,
        n_prompt,
        len(t.tokens),
        min_version,
        max_version,
        len(segments),
        t.requests,
        t.kv_version,
        float(t.started_at),
        float(t.finished_at),
        t.server,
        msgspec.json.encode(segments).decode(),
        t.tokens.astype(np.int32).tobytes(),
        t.behavior_logprobs.astype(np.float32).tobytes(),
        t.versions.astype(np.int32).tobytes(),
        prompt,
        completion,
    )
    return (*values, checksum(values))
