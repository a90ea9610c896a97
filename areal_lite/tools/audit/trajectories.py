"""The trajectories of the store: their segments, copies among them, and on request every token."""

from __future__ import annotations

import numpy as np

from areal_lite.run_dir.reader import Chunk, RunReader
from areal_lite.run_dir.store_format import NOT_KEPT, check_sums, from_row
from areal_lite.tools.audit.records import Check
from areal_lite.trajectory import trace_name

COLUMNS = (
    *("group", "sample", "trace", "traces", "step", "reward", "prompt", "tokens"),
    *("oldest", "newest", "num_segments", "started", "finished"),
)


class Shapes:
    """Checks each trajectory by itself, and that no two groups have the same one."""

    def __init__(self, group_ids: np.ndarray):
        """Take `group_ids`: int64, ascending, as in the table of groups."""
        self.group_ids = group_ids
        # Trajectories of each group, and of groups that have no row.
        self.found = np.zeros(len(group_ids), np.int64)
        self._orphans: set[int] = set()
        self._total = 0
        self._wrong: dict[str, list[str]] = {}
        # Fingerprint and group of each trajectory that was trained on, int64 [2, n].
        self._used: list[np.ndarray] = []

    def add(self, chunk: Chunk) -> None:
        """Check the trajectories of `chunk`."""
        place = np.searchsorted(self.group_ids, chunk["group"])
        known = np.zeros(len(chunk), bool)
        inside = place < len(self.group_ids)
        known[inside] = self.group_ids[place[inside]] == chunk["group"][inside]
        np.add.at(self.found, place[known], 1)
        self._orphans.update(chunk["group"][~known].tolist())
        self._total += len(chunk)
        for what, wrong in _violations(chunk).items():
            columns = (chunk[name][wrong] for name in ("group", "sample", "trace"))
            ids = [f"{group}/{trace_name(*trace)}" for group, *trace in zip(*columns)]
            self._wrong.setdefault(what, []).extend(ids)
        used = chunk["step"] >= 0
        self._used.append(np.stack([fingerprints(chunk), chunk["group"]])[:, used])

    def checks(self) -> list[Check]:
        """Return what was found."""
        segments = Check(
            name="versions",
            looked_at=f"{self._total:,} trajectories: versions never decrease, and segments fit "
            "their tokens",
        )
        for what, ids in self._wrong.items():
            segments.none_of(ids, what)
        segments.none_of(sorted(self._orphans), "trajectories of groups that have no row")
        return [segments, self._copies()]

    def _copies(self) -> Check:
        used = np.concatenate([np.empty((2, 0), np.int64), *self._used], axis=1)
        used = used[:, np.argsort(used[0], kind="stable")]
        same = (used[0, 1:] == used[0, :-1]) & (used[1, 1:] != used[1, :-1])
        pairs = np.stack([used[1, :-1], used[1, 1:]])[:, same]
        check = Check(
            name="copies",
            looked_at=f"{used.shape[1]:,} trajectories that were trained on: no two are the same",
        )
        check.none_of(
            sorted({f"{min(pair)} = {max(pair)}" for pair in pairs.T.tolist()}),
            "pairs of groups with the same trajectory",
        )
        return check


def fingerprints(chunk: Chunk) -> np.ndarray:
    """Return a number of each trajectory that is equal for copies, int64 [n].

    Two trajectories never start and end at the same times, to a part of a microsecond.
    """
    columns = (chunk["started"], chunk["finished"], chunk.sampled)
    mixed = np.zeros(len(chunk), np.uint64)
    for column in columns:
        mixed = _mix(mixed ^ column.view(np.uint64))
    return mixed.view(np.int64)


def _mix(bits: np.ndarray) -> np.ndarray:
    """Spread every bit over all 64, uint64 [n] (the finalizer of splitmix64)."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _violations(chunk: Chunk) -> dict[str, np.ndarray]:
    """Return by what is wrong the trajectories with it, bool [n]. Only what occurs is there."""
    n, columns = len(chunk), chunk.columns
    next_to = chunk.owner[1:] == chunk.owner[:-1]
    back = next_to & (chunk.version[1:] < chunk.version[:-1])
    overlap = next_to & (chunk.start[1:] < chunk.end[:-1])
    first = np.searchsorted(chunk.owner, np.arange(n))
    last = np.searchsorted(chunk.owner, np.arange(n), side="right") - 1
    has = last >= first
    summary = np.zeros(n, bool)
    summary[has] = (
        (chunk.version[first[has]] != columns["oldest"][has])
        | (chunk.version[last[has]] != columns["newest"][has])
        | (chunk.start[first[has]] != columns["prompt"][has])
    )
    summary |= (last - first + 1) != columns["num_segments"]
    outside = (chunk.start >= chunk.end) | (chunk.end > columns["tokens"][chunk.owner])
    found = {
        "trajectories whose versions go back": _owners(chunk.owner[1:][back], n),
        "trajectories whose segments overlap": _owners(chunk.owner[1:][overlap], n),
        "trajectories with a segment outside of their tokens": _owners(chunk.owner[outside], n),
        "trajectories without a version": _owners(chunk.owner[chunk.version < 0], n),
        "trajectories whose columns contradict their segments": summary,
        "trajectories that were trained on without a reward": (chunk["step"] >= 0)
        & np.isnan(columns["reward"]),
    }
    return {what: wrong for what, wrong in found.items() if wrong.any()}


def _owners(indices: np.ndarray, n: int) -> np.ndarray:
    return np.bincount(indices, minlength=n).astype(bool)


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
