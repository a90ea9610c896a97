"""The rows of the store token by token: their checksums and the invariants of a trajectory."""

from __future__ import annotations

import sqlite3

import msgspec

from areal_lite.audit.check import Check
from areal_lite.run_dir.store_schema import from_row


def check_rows(db: sqlite3.Connection) -> Check:
    """Read the whole store, one trajectory at a time."""
    cursor = db.execute("SELECT * FROM trajectories ORDER BY group_id, sample_index")
    names = [column[0] for column in cursor.description]
    damaged: list[str] = []
    total = 0
    for values in cursor:
        row = dict(zip(names, values))
        total += 1
        try:
            segments = [[s.version, s.start, s.end] for s in from_row(row, "").segments]
            good = msgspec.json.decode(row["segments"]) == segments
        except ValueError:
            good = False
        if not good:
            damaged.append(f"{row['group_id']}/{row['sample_index']}")
    check = Check(
        name="tokens", looked_at=f"{total:,} trajectories: checksums, log-probs, versions"
    )
    check.none_of(damaged, "trajectories that are damaged")
    return check
