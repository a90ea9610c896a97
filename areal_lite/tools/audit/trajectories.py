"""The trajectories of a store in chunks: a few numbers of each, and its segments, as arrays."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from areal_lite.tools.audit.check import Check
from areal_lite.trajectory import trace_name

# Trajectories that are read at once.
_CHUNK = 8192

_COLUMNS = {
    "group": ("t.group_id", np.int64),
    "sample": ("t.sample_index", np.int64),
    "trace": ("t.trace_index", np.int64),
    "traces": (
        "(SELECT count(*) FROM trajectories e"
        " WHERE e.group_id = t.group_id AND e.sample_index = t.sample_index)",
        np.int64,
    ),
    "reward": ("t.reward", np.float64),
    "prompt": ("t.n_prompt", np.int64),
    "tokens": ("t.n_tokens", np.int64),
    "oldest": ("coalesce(t.min_version, -1)", np.int64),
    "newest": ("coalesce(t.max_version, -1)", np.int64),
    "num_segments": ("t.num_segments", np.int64),
    "started": ("t.started_at", np.float64),
    "finished": ("t.finished_at", np.float64),
}
_SEGMENTS = msgspec.json.Decoder(list[list[tuple[int, int, int]]])

EACH = """trajectories t LEFT JOIN groups g USING (group_id)
          ORDER BY t.group_id, t.sample_index, t.trace_index"""
"""Every trajectory once. Its step is that of its group."""

DRAWN = """draws g JOIN trajectories t USING (group_id, sample_index)
           ORDER BY g.step, g.draw, g.position, t.trace_index"""
"""Every trajectory as often as it was drawn from a replay buffer, with the step of the draw."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some trajectories, n of them with s segments.

    Args:
        columns: arrays [n] by the names of `_COLUMNS`.
        step: int64 [n], the training step that used it, from 0; -1 for none.
        owner: int64 [s], the trajectory of each segment, an index below n.
        version, start, end: int64 [s].
    """

    columns: dict[str, np.ndarray]
    step: np.ndarray
    owner: np.ndarray
    version: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @property
    def group(self) -> np.ndarray:
        """Return the group of each trajectory, int64 [n]."""
        return self.columns["group"]

    @property
    def sampled(self) -> np.ndarray:
        """Return the sampled tokens of each trajectory, int64 [n]."""
        lengths = self.end - self.start
        return np.bincount(self.owner, lengths, len(self.step)).astype(np.int64)


def chunks(db: sqlite3.Connection, source: str) -> Iterator[Chunk]:
    """Yield the trajectories of `source`, which is EACH or DRAWN."""
    columns = ", ".join(expression for expression, _ in _COLUMNS.values())
    cursor = db.execute(f"SELECT coalesce(g.step, -1), t.segments, {columns} FROM {source}")
    while rows := cursor.fetchmany(_CHUNK):
        step, segments, *values = zip(*rows)
        decoded: list[Any] = _SEGMENTS.decode(f"[{','.join(segments)}]")
        lengths = np.array([len(found) for found in decoded], np.int64)
        flat = np.array([part for found in decoded for part in found], np.int64).reshape(-1, 3)
        yield Chunk(
            columns={
                name: np.array(column, dtype)
                for (name, (_, dtype)), column in zip(_COLUMNS.items(), values)
            },
            step=np.array(step, np.int64),
            owner=np.repeat(np.arange(len(lengths)), lengths),
            version=flat[:, 0],
            start=flat[:, 1],
            end=flat[:, 2],
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
        place = np.searchsorted(self.group_ids, chunk.group)
        known = np.zeros(len(chunk.group), bool)
        inside = place < len(self.group_ids)
        known[inside] = self.group_ids[place[inside]] == chunk.group[inside]
        np.add.at(self.found, place[known], 1)
        self._orphans.update(chunk.group[~known].tolist())
        self._total += len(chunk.group)
        for what, wrong in _violations(chunk).items():
            columns = (chunk.columns[name][wrong] for name in ("group", "sample", "trace"))
            ids = [f"{group}/{trace_name(*trace)}" for group, *trace in zip(*columns)]
            self._wrong.setdefault(what, []).extend(ids)
        used = chunk.step >= 0
        self._used.append(np.stack([fingerprints(chunk), chunk.group])[:, used])

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
    columns = (chunk.columns["started"], chunk.columns["finished"], chunk.sampled)
    mixed = np.zeros(len(chunk.step), np.uint64)
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
    n, columns = len(chunk.step), chunk.columns
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
        "trajectories that were trained on without a reward": (chunk.step >= 0)
        & np.isnan(columns["reward"]),
    }
    return {what: wrong for what, wrong in found.items() if wrong.any()}


def _owners(indices: np.ndarray, n: int) -> np.ndarray:
    return np.bincount(indices, minlength=n).astype(bool)
