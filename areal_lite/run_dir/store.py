"""The trajectory store, `<run_dir>/trajectories.sqlite`: what a run owes and what it has, readable at any time by any SQLite client.

A *group* is a prompt handed out. Its row exists before its first request is sent, and it moves

    in_flight -> finished -> used (at a step)        with `dropped` (failed or overdue) and `filtered` as the other two ends.

Only `recover`, with which a run goes on, takes a group back: what weights used that are lost is finished again, or dropped.

A finished group has `num_trajectories` rows in `trajectories`: all that survived of its group. Arrays are little-endian blobs: tokens int32,
logprobs float32, versions int32, over prompt and completion. The write-ahead log survives the death of any process at any moment.

`Store` is plain blocking SQLite. `StoreThread` runs it on a thread of its own, and commits everything that has queued up meanwhile at once.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_lite.trajectory import Group, Trajectory

_DRAWS = 100  # of Recovered: so many agree with another order of prompts by chance only if there is hardly any order


_ROWS_AT_ONCE = 1000  # SQLite takes 32766 values in a statement


STATES = ("in_flight", "finished", "used", "filtered", "dropped")


_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL, prompt_index INTEGER NOT NULL, drawn INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('in_flight', 'finished', 'used', 'filtered', 'dropped')),
    reason TEXT, size INTEGER NOT NULL, num_trajectories INTEGER, admitted_at REAL NOT NULL, finished_at REAL, step INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS groups_by_state ON groups (state);
CREATE TABLE IF NOT EXISTS trajectories (
    group_id INTEGER NOT NULL REFERENCES groups, sample_index INTEGER NOT NULL, reward REAL, finish_reason TEXT NOT NULL,
    n_prompt INTEGER NOT NULL, n_tokens INTEGER NOT NULL, min_version INTEGER, max_version INTEGER, num_segments INTEGER NOT NULL,
    requests INTEGER NOT NULL, kv_version INTEGER NOT NULL, started_at REAL NOT NULL, finished_at REAL NOT NULL, segments TEXT NOT NULL,
    tokens BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL, prompt TEXT, completion TEXT,
    PRIMARY KEY (group_id, sample_index)
) STRICT, WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a run that goes on has: groups, waiting groups, and where its prompt sampler was. `draws`: `drawn` and index of those drawn last."""

    groups: int
    waiting: int
    drawn: int
    put_back: list[int]
    draws: list[tuple[int, int]]
    filtered: Counter[str]


class Store:
    """Used by one thread at a time. Each method is one change or one question; `begin` … `commit` make several one."""

    def __init__(self, path: Path, read_only: bool = False):
        """Creates the file if need be. `read_only` is for a look at a run that may be alive. Raises ValueError when there is none."""
        if read_only and not path.exists():
            raise ValueError(f"{path} does not exist: give a run directory that has a {path.name}")
        # Autocommit outside of explicit transactions: Python's implicit ones are one more state to reason about.
        place = f"file:{path}?mode=ro" if read_only else path
        self._db = sqlite3.connect(
            place, uri=read_only, isolation_level=None, check_same_thread=False
        )
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            # Without a sync per commit, a power cut may lose the last transactions, but not the file; a dying process loses nothing.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def admit(
        self, group_id: int, prompt_id: str, prompt_index: int, drawn: int, size: int, now: float
    ) -> None:
        """A new group, in flight: `size` trajectories are about to be generated. Group ids count from 0. `drawn`: PromptSampler's, after
        it gave `prompt_index`."""
        self._db.execute(
            "INSERT INTO groups (group_id, prompt_id, prompt_index, drawn, state, size, admitted_at) VALUES (?, ?, ?, ?, 'in_flight', ?, ?)",
            (group_id, prompt_id, prompt_index, drawn, size, now),
        )

    def finish(
        self,
        group: Group,
        texts: Sequence[tuple[str | None, str | None]],
        reason: str | None,
        now: float,
        state: str = "finished",
    ) -> None:
        """in_flight -> finished | filtered, with its trajectories. `texts` are (prompt, completion) of each; `reason` says why it was
        filtered, or why members are missing."""
        assert state in ("finished", "filtered")
        rows = [
            _row(trajectory, *text)
            for trajectory, text in zip(group.trajectories, texts, strict=True)
        ]
        # One statement for many rows: for each the interpreter's lock is given up once, and waited for while the event loop is busy.
        for some in (rows[i : i + _ROWS_AT_ONCE] for i in range(0, len(rows), _ROWS_AT_ONCE)):
            marks = f"({', '.join('?' * len(some[0]))})"
            self._db.execute(
                f"INSERT INTO trajectories VALUES {', '.join([marks] * len(some))}",
                list(chain.from_iterable(some)),
            )
        self._move(
            group.group_id,
            ("in_flight",),
            state,
            reason=reason,
            num_trajectories=len(rows),
            finished_at=now,
        )

    def use(self, group_ids: Sequence[int], step: int) -> None:
        """finished -> used at `step`."""
        query = "UPDATE groups SET state = 'used', step = ? WHERE state = 'finished' AND group_id IN (SELECT value FROM json_each(?))"
        done = self._db.execute(query, (step, msgspec.json.encode(list(group_ids)).decode()))
        if done.rowcount != len(group_ids):
            raise RuntimeError(
                f"of the {len(group_ids)} groups of step {step} only {done.rowcount} are finished"
            )

    def drop(self, group_id: int, reason: str, now: float) -> None:
        """in_flight | finished -> dropped, and why."""
        self._move(group_id, ("in_flight", "finished"), "dropped", reason=reason, finished_at=now)

    def _move(self, group_id: int, before: tuple[str, ...], state: str, **columns: Any) -> None:
        assignments = "".join(f", {name} = coalesce(?, {name})" for name in columns)
        done = self._db.execute(
            f"UPDATE groups SET state = ?{assignments} WHERE group_id = ? AND state IN ({', '.join('?' * len(before))})",
            (state, *columns.values(), group_id, *before),
        )
        if done.rowcount != 1:
            raise RuntimeError(
                f"group {group_id} was to become {state}, but is not {' or '.join(before)}"
            )

    def recover(self, version: int, now: float) -> Recovered:
        """Go on with the weights of `version`, before anything else is done: forget what was trained on at step `version` or later.

        What weights up to `version` sampled waits again; what later ones did, or was in flight, is dropped, to be sampled again.
        """
        values = {"version": version, "now": now}
        later = "SELECT 1 FROM trajectories WHERE trajectories.group_id = groups.group_id AND max_version > :version"
        drop = "UPDATE groups SET state = 'dropped', step = NULL, finished_at = :now, reason ="
        unused = "(state = 'finished' OR (state = 'used' AND step >= :version))"
        self.begin()
        self._db.execute(f"{drop} 'resume: was in flight' WHERE state = 'in_flight'", values)
        self._db.execute(
            f"{drop} 'resume: its weights are lost' WHERE {unused} AND EXISTS ({later})", values
        )
        self._db.execute(
            "UPDATE groups SET state = 'finished', step = NULL WHERE state = 'used' AND step >= :version",
            values,
        )
        self.commit()
        counts = self.counts()
        filtered = Counter(
            dict(
                self._db.execute(
                    "SELECT reason, count(*) FROM groups WHERE state = 'filtered' GROUP BY reason"
                )
            )
        )
        return Recovered(sum(counts.values()), counts["finished"], *self._sampled(), filtered)

    def _sampled(self) -> tuple[int, list[int], list[tuple[int, int]]]:
        """`drawn`, `put_back` and `draws` of Recovered. A dropped group's prompt was put back; a group that was admitted without a new draw
        had one that was."""
        draws: deque[tuple[int, int]] = deque(maxlen=_DRAWS)
        served_again: Counter[int] = Counter()
        drawn = 0
        for now, index in self._db.execute(
            "SELECT drawn, prompt_index FROM groups ORDER BY group_id"
        ):
            if now > drawn:
                draws.append((now, index))
            else:
                served_again[index] += 1
            drawn = now
        put_back = []
        for (index,) in self._db.execute(
            "SELECT prompt_index FROM groups WHERE state = 'dropped' ORDER BY finished_at, group_id"
        ):
            if served_again[index]:
                served_again[index] -= 1
            else:
                put_back.append(index)
        return drawn, put_back, list(draws)

    def rewards(self) -> Iterator[tuple[int, list[float]]]:
        """Prompt index and rewards of each group that was not dropped, in the order of finishing."""
        query = "SELECT prompt_index, json_group_array(reward) FROM groups JOIN trajectories USING (group_id) WHERE state != 'dropped'"
        for index, rewards in self._db.execute(
            f"{query} GROUP BY group_id ORDER BY groups.finished_at, group_id"
        ):
            yield index, msgspec.json.decode(rewards)

    def counts(self) -> dict[str, int]:
        """Groups by state, all states named."""
        found = dict(
            self._db.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall()
        )
        return {state: found.get(state, 0) for state in STATES}

    def missing_trajectories(self) -> int:
        """Trajectories that finished or used groups should have, but that are not there. Anything but 0 is a bug."""
        owed = self._db.execute(
            "SELECT coalesce(sum(num_trajectories), 0) FROM groups WHERE state IN ('finished', 'used')"
        ).fetchone()[0]
        return (
            owed
            - self._db.execute(
                "SELECT count(*) FROM trajectories JOIN groups USING (group_id) WHERE state IN ('finished', 'used')"
            ).fetchone()[0]
        )

    def groups(self) -> Iterator[dict[str, Any]]:
        """Each group as a dict of its columns, in the order of admission."""
        yield from self._rows("SELECT * FROM groups ORDER BY group_id")

    def trajectories(self, state: str | None = None) -> Iterator[dict[str, Any]]:
        """Each trajectory by group and sample_index: a dict of its columns, blobs as numpy arrays, and its group's state, step and prompt_id."""
        where, values = ("WHERE state = ?", (state,)) if state else ("", ())
        query = f"FROM trajectories JOIN groups USING (group_id) {where} ORDER BY group_id, sample_index"
        for row in self._rows(f"SELECT trajectories.*, state, step, prompt_id {query}", values):
            row["tokens"] = np.frombuffer(row["tokens"], np.int32)
            row["logprobs"] = np.frombuffer(row["logprobs"], np.float32)
            row["versions"] = np.frombuffer(row["versions"], np.int32)
            row["segments"] = msgspec.json.decode(row["segments"])
            yield row

    def finished_groups(self) -> Iterator[tuple[Group, bool]]:
        """The groups that finished and were neither filtered nor dropped, in the order of finishing, and whether a step has used them."""
        yield from self._groups("state IN ('finished', 'used') ORDER BY finished_at, group_id")

    def waiting_groups(self) -> list[Group]:
        """The groups that no step has used yet, in the order of admission."""
        return [group for group, _ in self._groups("state = 'finished' ORDER BY group_id")]

    def used_groups(self, step: int) -> list[Group]:
        """The groups of the batch of `step`, in the order of admission."""
        return [
            group
            for group, _ in self._groups("state = 'used' AND step = ? ORDER BY group_id", (step,))
        ]

    def _groups(self, which: str, values: Sequence[Any] = ()) -> Iterator[tuple[Group, bool]]:
        query = f"SELECT group_id, prompt_id, size, prompt_index, state = 'used' FROM groups WHERE {which}"
        for group_id, prompt_id, size, index, used in self._db.execute(query, values):
            rows = self._rows(
                "SELECT * FROM trajectories WHERE group_id = ? ORDER BY sample_index", (group_id,)
            )
            yield (
                Group(
                    group_id=group_id,
                    prompt_id=prompt_id,
                    size=size,
                    trajectories=[_trajectory(row, prompt_id) for row in rows],
                    prompt_index=index,
                ),
                bool(used),
            )

    def _rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[dict[str, Any]]:
        cursor = self._db.execute(query, values)
        names = [column[0] for column in cursor.description]
        for row in cursor:
            yield dict(zip(names, row))


def _trajectory(row: dict[str, Any], prompt_id: str) -> Trajectory:
    versions = np.frombuffer(row["versions"], np.int32)
    return Trajectory(
        group_id=row["group_id"], prompt_id=prompt_id, sample_index=row["sample_index"], tokens=np.frombuffer(row["tokens"], np.int32), loss_mask=versions >= 0,
        behavior_logprobs=np.frombuffer(row["logprobs"], np.float32), versions=versions, finish_reason=row["finish_reason"], reward=row["reward"],
        started_at=row["started_at"], finished_at=row["finished_at"], requests=row["requests"], kv_version=row["kv_version"],
    )  # fmt: skip


def _row(t: Trajectory, prompt: str | None, completion: str | None) -> tuple[Any, ...]:
    segments = [[s.version, s.start, s.end] for s in t.segments]
    low, n_prompt, _ = segments[0] if segments else (None, len(t.tokens), None)
    high = segments[-1][0] if segments else None
    return (
        t.group_id, t.sample_index, t.reward, t.finish_reason, n_prompt, len(t.tokens), low, high, len(segments),
        t.requests, t.kv_version, t.started_at, t.finished_at,
        msgspec.json.encode(segments).decode(), t.tokens.astype(np.int32).tobytes(), t.behavior_logprobs.astype(np.float32).tobytes(),
        t.versions.astype(np.int32).tobytes(), prompt, completion,
    )  # fmt: skip
