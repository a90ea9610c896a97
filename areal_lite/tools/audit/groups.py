"""The rollout groups: their states, their trajectories, and the steps that used them."""

from __future__ import annotations

import numpy as np

from areal_lite.run_dir.reader import Groups, RunReader
from areal_lite.run_dir.store_schema import NOT_KEPT
from areal_lite.tools.audit.check import Check, count, some
from areal_lite.tools.audit.records import Records
from areal_lite.trajectory import GroupState

_NONE = -1


def check_groups(groups: Groups, found: np.ndarray, records: Records, store: RunReader) -> Check:
    """Check ids, states and trajectories. `found`: int64 [n], the trajectories that are there."""
    states = ", ".join(
        f"{groups.number(state):,} {state.value.replace('_', ' ')}" for state in GroupState
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
    none_may(np.isnan(groups.finished) != flying, "groups whose end and state do not agree")
    none_may(has_trajectories & (groups.trajectories < 1), "finished groups without trajectories")
    check.none_of(store.groups_with_surplus(), "groups with more episodes than were asked for")
    check.none_of(store.groups_without_traces(), "groups with an episode that lacks a trace")
    expected = np.maximum(groups.trajectories, 0)
    none_may(found < expected, "groups that lack trajectories")
    none_may(found > expected, "groups with more trajectories than they count")
    _check_tokens(check, groups, records, store)
    return check


def _check_tokens(check: Check, groups: Groups, records: Records, store: RunReader) -> None:
    """Check that tokens are there, or were removed where nothing needs them."""
    kept, removed = groups.kept > 0, groups.kept == 0
    if removed.any():
        check.looked_at += f"; {NOT_KEPT}: {count(int(removed.sum()), 'group')}"
    owners, numbers = store.kept_trajectories().T
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


def check_use(groups: Groups, records: Records, store: RunReader) -> Check:
    """Check that each completed step used one batch, and agrees with metrics.jsonl."""
    if records.replays:
        return _check_draws(groups, records, store)
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


def _check_draws(groups: Groups, records: Records, store: RunReader) -> Check:
    """Check the batches that were drawn from a replay buffer."""
    drawn = store.draw_counts()
    steps = max(drawn, default=-1) + 1
    sizes = sorted({start.batch_groups for start in records.starts})
    episodes = sum(episodes for _, episodes in drawn.values())
    check = Check(
        name="batches", looked_at=f"{steps:,} steps drew {episodes:,} episodes from the buffer"
    )
    wrong = [step + 1 for step in range(steps) if drawn.get(step, (0, 0))[0] not in sizes]
    check.none_of(wrong, "steps with another number of groups")
    check.none_of(store.groups_drawn_in_vain(), "groups that were drawn from and lack trajectories")
    check.none_of(store.groups_drawn_twice(), "groups with an episode that was drawn twice at once")
    mixed = [step + 1 for step in store.mixed_draws()]
    check.none_of(mixed, "steps with a draw from two prompts")
    first = store.first_draws()
    used = dict(zip(groups.ids.tolist(), groups.step.tolist()))
    check.none_of(
        sorted(i for i in used.keys() | first.keys() if used.get(i, _NONE) != first.get(i, _NONE)),
        "groups whose step is not that of their first draw",
    )
    _check_ends(check, steps, records)
    return check
