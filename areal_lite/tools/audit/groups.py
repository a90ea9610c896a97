"""The rollout groups: their states, their trajectories, and the steps that used them."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_lite.run_dir.store_schema import ADMISSION, NOT_KEPT, checksum
from areal_lite.tools.audit.check import Check, count, some
from areal_lite.tools.audit.records import Records
from areal_lite.trajectory import GroupState

STATES = list(GroupState)
_CHUNK = 8192
_NONE = -1
_EPISODES = {
    "SELECT group_id FROM groups JOIN trajectories USING (group_id) WHERE trace_index = 0 "
    "GROUP BY group_id HAVING count(*) > size": "groups with more episodes than were asked for",
    "SELECT DISTINCT group_id FROM trajectories GROUP BY group_id, sample_index "
    "HAVING max(trace_index) >= count(*)": "groups with an episode that lacks a trace",
}


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The table of groups, n of them, in the order of admission.

    Args:
        ids, prompt, drawn, size: int64 [n], as in the store. `prompt` is an index.
        state: int64 [n], an index into STATES.
        trajectories, step: int64 [n], -1 without one.
        kept: int64 [n], the bytes of the tokens of its trajectories; -1 without trajectories.
        reason, finished: bool [n], whether there is one.
        admitted_at, ended_at: float64 [n], NaN before.
        damaged: bool [n], admissions that their checksum contradicts.
    """

    ids: np.ndarray
    prompt: np.ndarray
    drawn: np.ndarray
    size: np.ndarray
    state: np.ndarray
    trajectories: np.ndarray
    step: np.ndarray
    kept: np.ndarray
    reason: np.ndarray
    admitted_at: np.ndarray
    ended_at: np.ndarray
    damaged: np.ndarray

    def are(self, state: GroupState) -> np.ndarray:
        """Tell which groups are in `state`, bool [n]."""
        return self.state == STATES.index(state)

    def number(self, state: GroupState) -> int:
        """Return the number of groups in `state`."""
        return int(np.count_nonzero(self.are(state)))


def read_groups(db: sqlite3.Connection) -> Groups:
    """Read the table of groups, about 100 bytes each."""
    cursor = db.execute(
        f"SELECT {', '.join(ADMISSION)}, checksum, state, coalesce(num_trajectories, -1), "
        "coalesce(step, -1), coalesce(kept_bytes, -1), reason IS NOT NULL, finished_at "
        "FROM groups ORDER BY group_id"
    )
    parts: list[np.ndarray] = []
    while rows := cursor.fetchmany(_CHUNK):
        parts.append(np.array([_numbers(row) for row in rows], np.float64))
    table = np.concatenate([np.empty((0, 12)), *parts]).T
    names = ("ids", "prompt", "drawn", "size", "state", "trajectories", "step", "kept")
    whole = {name: column.astype(np.int64) for name, column in zip(names, table)}
    return Groups(
        **whole,
        reason=table[8] > 0,
        admitted_at=table[9],
        ended_at=table[10],
        damaged=table[11] > 0,
    )


def _numbers(row: tuple[Any, ...]) -> tuple[float, ...]:
    """Return the columns of Groups for a row of the table."""
    *admission, expected, state, trajectories, step, kept, reason, ended_at = row
    group_id, _, index, drawn, size, admitted_at = admission
    damaged = checksum(admission) != expected
    state = STATES.index(GroupState(state))
    ended_at = np.nan if ended_at is None else ended_at
    counts = (trajectories, step, kept)
    return (group_id, index, drawn, size, state, *counts, reason, admitted_at, ended_at, damaged)


def check_groups(
    groups: Groups, found: np.ndarray, records: Records, db: sqlite3.Connection
) -> Check:
    """Check ids, states and trajectories. `found`: int64 [n], the trajectories that are there."""
    states = ", ".join(
        f"{groups.number(state):,} {state.value.replace('_', ' ')}" for state in STATES
    )
    check = Check(name="groups", looked_at=f"{count(len(groups.ids), 'group')}: {states}")
    missing = np.setdiff1d(np.arange(groups.ids.max(initial=-1) + 1), groups.ids)
    check.none_of(missing.tolist(), "groups whose row is gone")

    def none_may(wrong: np.ndarray, what: str) -> None:
        check.none_of(groups.ids[wrong].tolist(), what)

    flying, dropped = groups.are(GroupState.IN_FLIGHT), groups.are(GroupState.DROPPED)
    used, filtered = groups.are(GroupState.USED), groups.are(GroupState.FILTERED)
    has_trajectories = used | filtered | groups.are(GroupState.FINISHED)
    none_may(groups.damaged, "groups whose admission its checksum contradicts")
    none_may(used & (groups.step < 0), "used groups without a step")
    # The batch of the present step is assigned, and not yet used.
    assigned = groups.are(GroupState.FINISHED) & (groups.step > groups.step[used].max(initial=-1))
    none_may(~used & ~assigned & (groups.step >= 0), "groups with a step that are not used")
    none_may((dropped | filtered) & ~groups.reason, "groups left out without a reason")
    none_may(np.isnan(groups.ended_at) != flying, "groups whose end and state do not agree")
    none_may(has_trajectories & (groups.trajectories < 1), "finished groups without trajectories")
    for query, what in _EPISODES.items():
        check.none_of((group for (group,) in db.execute(query)), what)
    expected = np.maximum(groups.trajectories, 0)
    none_may(found < expected, "groups that lack trajectories")
    none_may(found > expected, "groups with more trajectories than they count")
    _check_tokens(check, groups, records, db)
    return check


def _check_tokens(check: Check, groups: Groups, records: Records, db: sqlite3.Connection) -> None:
    """Check that tokens are there, or were removed where nothing needs them."""
    kept, removed = groups.kept > 0, groups.kept == 0
    if removed.any():
        check.looked_at += f"; {NOT_KEPT}: {count(int(removed.sum()), 'group')}"
    rows = db.execute("SELECT group_id, count(*) FROM sequences GROUP BY group_id").fetchall()
    owners, numbers = np.array(rows, np.int64).reshape(-1, 2).T
    place = np.searchsorted(groups.ids, owners).clip(max=len(groups.ids) - 1)
    known = groups.ids[place] == owners if len(groups.ids) else np.zeros(len(owners), bool)
    found = np.zeros(len(groups.ids), np.int64)
    found[place[known]] = numbers[known]
    expected = np.where(kept, groups.trajectories, 0)
    needed = groups.are(GroupState.FINISHED) & (not records.replays)
    if not records.running:  # a run removes tokens when a newer checkpoint is there
        needed |= groups.are(GroupState.USED) & (groups.step >= records.resumes_from)
    for wrong, what in (
        ((groups.kept < 0) != (groups.trajectories < 0), "groups whose tokens are not counted"),
        (found < expected, "groups that lack tokens"),
        (found > expected, "groups with tokens that they do not count"),
        (needed & removed, "groups that a resume needs, and whose tokens were removed"),
    ):
        check.none_of(groups.ids[wrong].tolist(), what)
    check.none_of(owners[~known].tolist(), "tokens of groups that have no row")


def check_use(groups: Groups, records: Records, db: sqlite3.Connection) -> Check:
    """Check that each completed step used one batch, and agrees with metrics.jsonl."""
    if records.replays:
        return _check_draws(groups, records, db)
    steps = groups.step[groups.are(GroupState.USED) & (groups.step >= 0)]
    per_step = np.bincount(steps)
    sizes = sorted({start.batch_groups for start in records.starts})
    check = Check(
        name="batches",
        looked_at=f"{count(len(per_step), 'step')}: each used {some(sizes)} groups",
    )
    wrong = np.flatnonzero(~np.isin(per_step, sizes))
    check.none_of(
        [f"{i + 1} ({per_step[i]})" for i in wrong], "steps with another number of groups"
    )
    _check_ends(check, len(per_step), records)
    return check


def _check_ends(check: Check, steps: int, records: Records) -> None:
    """Check that store and metrics.jsonl end at the same step.

    The store has a step before metrics.jsonl has it. A start that resumes cuts off both, one after
    the other, and may die between.
    """
    rows = len(records.metrics)
    behind, ahead = rows - steps, steps - rows
    check.expect(
        behind <= 0 or steps == records.resumes_from,
        f"metrics.jsonl has {count(rows, 'step')}, the store {steps:,}",
    )
    check.expect(
        records.running or ahead <= 1 or rows == records.resumes_from,
        f"the store has {count(steps, 'step')}, metrics.jsonl {rows:,}",
    )
    newest = records.resumes_from
    check.expect(
        min(steps, rows) >= newest,
        f"there is a checkpoint of step {newest}, but store and metrics.jsonl do not have all of "
        "the steps before it",
    )


def _check_draws(groups: Groups, records: Records, db: sqlite3.Connection) -> Check:
    """Check the batches that were drawn from a replay buffer."""
    query = db.execute
    ((draws, steps),) = query("SELECT count(*), coalesce(max(step), -1) + 1 FROM draws")
    sizes = sorted({start.batch_groups for start in records.starts})
    check = Check(
        name="batches", looked_at=f"{steps:,} steps drew {draws:,} episodes from the buffer"
    )
    per_step = dict(query("SELECT step, count(DISTINCT draw) FROM draws GROUP BY step"))
    wrong = [step for step in range(steps) if per_step.get(step) not in sizes]
    check.none_of([step + 1 for step in wrong], "steps with another number of groups")
    lacking = query(
        "SELECT DISTINCT group_id FROM draws LEFT JOIN trajectories t "
        "USING (group_id, sample_index) WHERE t.n_tokens IS NULL"
    )
    check.none_of((i for (i,) in lacking), "groups that were drawn from and lack trajectories")
    twice = query(
        "SELECT DISTINCT group_id FROM draws GROUP BY step, draw, group_id, sample_index "
        "HAVING count(*) > 1"
    )
    check.none_of((i for (i,) in twice), "groups with an episode that was drawn twice at once")
    mixed = query(
        "SELECT DISTINCT d.step + 1 FROM draws d JOIN groups USING (group_id) "
        "GROUP BY d.step, d.draw HAVING count(DISTINCT prompt_id) > 1"
    )
    check.none_of((step for (step,) in mixed), "steps with a draw from two prompts")
    first: dict[int, int] = dict(query("SELECT group_id, min(step) FROM draws GROUP BY group_id"))
    used = dict(zip(groups.ids.tolist(), groups.step.tolist()))
    check.none_of(
        sorted(i for i in used.keys() | first.keys() if used.get(i, _NONE) != first.get(i, _NONE)),
        "groups whose step is not that of their first draw",
    )
    _check_ends(check, steps, records)
    return check
