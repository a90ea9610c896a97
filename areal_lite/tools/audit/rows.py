"""The rows of the store token by token: their checksums and the invariants of a trajectory."""

from __future__ import annotations

from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store_rows import check_sums, from_row
from areal_lite.run_dir.store_schema import NOT_KEPT
from areal_lite.tools.audit.check import Check
from areal_lite.trajectory import trace_name


def check_rows(store: RunReader) -> Check:
    """Read the whole store, one trajectory at a time."""
    damaged: list[str] = []
    total = without = 0
    for row in store.rows_to_check():
        total += 1
        without += row["tokens"] is None
        try:
            check_sums(row) if row["tokens"] is None else from_row(row, "")
        except ValueError:
            name = trace_name(row["sample_index"], row["trace_index"])
            damaged.append(f"{row['group_id']}/{name}")
    check = Check(
        name="tokens",
        looked_at=f"{total:,} trajectories: checksums, log-probs, versions"
        + (f"; {NOT_KEPT}: {without:,}" if without else ""),
    )
    check.none_of(damaged, "trajectories that are damaged")
    return check
