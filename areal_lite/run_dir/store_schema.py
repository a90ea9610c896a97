"""The tables of the trajectory store, and the checksum of their rows.

A trajectory has a row in `trajectories`, which stays. What takes the space is in its row in
`sequences`, which goes when the store reaches its bound (store_bound.py).

Each row has a checksum. SQLite notices damage to its own structures only, and a flipped bit in a
blob, a reward or a prompt index would train on wrong data without a sign.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_lite.trajectory import GroupState

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
    kept_bytes INTEGER,
    admitted_at REAL NOT NULL,
    finished_at REAL,
    step INTEGER,
    checksum INTEGER NOT NULL
) STRICT;
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_with_tokens ON groups (finished_at) WHERE kept_bytes > 0;
CREATE TABLE trajectories (
    group_id INTEGER NOT NULL REFERENCES groups,
    sample_index INTEGER NOT NULL,
    trace_index INTEGER NOT NULL,
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
    checksum INTEGER NOT NULL,
    PRIMARY KEY (group_id, sample_index, trace_index)
) STRICT, WITHOUT ROWID;
CREATE TABLE sequences (
    group_id INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    trace_index INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    texts BLOB,
    routes BLOB,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (group_id, sample_index, trace_index)
) STRICT;
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

TRACE = "group_id, sample_index, trace_index"
"""The columns that name a trajectory, in the order of traces."""

TOKENS = f"LEFT JOIN sequences USING ({TRACE})"
"""Joins the tokens to `trajectories`."""

WITH_TOKENS = "trajectories.*, tokens, logprobs, texts, sequences.checksum AS sequence_checksum"
"""The columns of both rows of a trajectory. Those of `sequences` are NULL where it has none."""

WITH_ROUTES = f"{WITH_TOKENS}, routes"
"""The same with the routes, which take more space than the rest. The checksum covers them."""

NOT_KEPT = "tokens not kept (store.max_gib)"
"""The words that readers show for a trajectory without a row in `sequences`."""


def checksum(values: Sequence[Any]) -> int:
    """Return the CRC-32 of the values of a row."""
    return zlib.crc32(msgspec.msgpack.encode(values))
