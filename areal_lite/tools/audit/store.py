"""The store of a run: its groups, their prompts and trajectories, and on request every token.

A group that raises `drawn` has a new prompt, the next in the sampler's order. Any other group has a
prompt that was put back: each dropped group puts its prompt back once. Hence

    prompts drawn = used + filtered + waiting + in flight + put back and not yet handed out again
"""

from dataclasses import replace

import numpy as np

from areal_lite.data.sampler import PromptSampler, SourceOrder
from areal_lite.run_dir.paths import QUARANTINE_FILE
from areal_lite.run_dir.store_format import NOT_KEPT, check_sums, from_row
from areal_lite.system.files import read_json
from areal_lite.tools.audit.records import Check, Records, Settings, some
from areal_lite.tools.formatting import counted
from areal_lite.tools.store_columns import DRAW_FAULTS, GROUP_FAULTS, ColumnReader, Columns, Groups
from areal_lite.trajectory import GroupState, trace_name

_NONE = -1
# A prompt that was put back is the next one to be handed out. While its drop is committed, others
# may still be drawn.
_COMMIT_S = 60.0


def check_groups(table: Columns, records: Records, store: ColumnReader) -> Check:
    """Check ids, states and trajectories."""
    groups = table.groups
    states = (f"{groups.number(state):,} {state.value.replace('_', ' ')}" for state in GroupState)
    check = Check("groups", f"{counted(len(groups.ids), 'group')}: {', '.join(states)}")
    missing = np.setdiff1d(np.arange(groups.ids.max(initial=-1) + 1), groups.ids)
    check.none_of(missing, "groups whose row is gone")

    def none_may(wrong: np.ndarray, what: str) -> None:
        check.none_of(groups.ids[wrong], what)

    flying, dropped = groups.are(GroupState.IN_FLIGHT), groups.are(GroupState.DROPPED)
    used, filtered = groups.are(GroupState.USED), groups.are(GroupState.FILTERED)
    has_trajectories = used | filtered | groups.are(GroupState.FINISHED)
    none_may(~np.isin(groups.state, list(GroupState)), "groups in a state that does not exist")
    none_may(groups.damaged, "groups whose admission its checksum contradicts")
    none_may(used & (groups.step < 0), "used groups without a step")
    # The batch of the present step is assigned, and not yet used.
    assigned = groups.are(GroupState.FINISHED) & (groups.step > groups.step[used].max(initial=-1))
    none_may(~used & ~assigned & (groups.step >= 0), "groups with a step that are not used")
    none_may((dropped | filtered) & ~groups.has_reason, "groups left out without a reason")
    none_may(np.isnan(groups.finished) != flying, "groups whose end and state do not agree")
    none_may(has_trajectories & (groups.trajectories < 1), "finished groups without trajectories")
    for fault, ids in store.faulty(GROUP_FAULTS):
        check.none_of(ids, fault)
    first, last = (np.searchsorted(table.group, groups.ids, side) for side in ("left", "right"))
    found, expected = last - first, np.maximum(groups.trajectories, 0)
    none_may(found < expected, "groups that lack trajectories")
    none_may(found > expected, "groups with more trajectories than they count")
    _check_tokens(check, groups, records, store)
    return check


def _check_tokens(check: Check, groups: Groups, records: Records, store: ColumnReader) -> None:
    """Check that tokens are there, or were removed where nothing needs them."""
    kept, removed = groups.kept > 0, groups.kept == 0
    if removed.any():
        check.looked_at += f"; {NOT_KEPT}: {counted(int(removed.sum()), 'group')}"
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
        check.none_of(groups.ids[wrong], what)
    check.none_of(owners[~known], "tokens of groups that have no row")


def check_use(groups: Groups, records: Records, store: ColumnReader) -> Check:
    """Check that each completed step used one batch, and agrees with metrics.jsonl."""
    sizes = sorted({start["trainer.batch_groups"] for start in records.starts})
    if records.replays:
        drawn = store.draw_counts()
        counts = [drawn.get(step, (0, 0))[0] for step in range(max(drawn, default=-1) + 1)]
        episodes = sum(episodes for _, episodes in drawn.values())
        looked_at = f"{len(counts):,} steps drew {episodes:,} episodes from the buffer"
    else:
        counts = np.bincount(groups.step[groups.are(GroupState.USED) & (groups.step >= 0)]).tolist()
        looked_at = f"{counted(len(counts), 'step')}: each used {some(sizes)} groups"
    check = Check("batches", looked_at)
    odd = [f"{step} ({count})" for step, count in enumerate(counts, 1) if count not in sizes]
    check.none_of(odd, "steps with another number of groups")
    if records.replays:
        _check_draws(check, groups, store)
    _check_ends(check, len(counts), records)
    return check


def _check_ends(check: Check, steps: int, records: Records) -> None:
    """Check that store and metrics.jsonl end at the same step.

    The store has a step before metrics.jsonl has it. A start that resumes cuts off both, one after
    the other, and may die between.
    """
    rows, newest = len(records.metrics), records.resumes_from
    check.expect(
        rows <= steps or steps == newest,
        f"metrics.jsonl has {counted(rows, 'step')}, the store {steps:,}",
    )
    check.expect(
        records.running or steps <= rows + 1 or rows == newest,
        f"the store has {counted(steps, 'step')}, metrics.jsonl {rows:,}",
    )
    check.expect(
        min(steps, rows) >= newest,
        f"there is a checkpoint of step {newest}, but store and metrics.jsonl do not have all of "
        "the steps before it",
    )


def _check_draws(check: Check, groups: Groups, store: ColumnReader) -> None:
    for fault, ids in store.faulty(DRAW_FAULTS):
        check.none_of(ids, fault)
    first = store.first_draws()
    used = dict(zip(groups.ids.tolist(), groups.step.tolist()))
    odd = sorted(i for i in used.keys() | first.keys() if used.get(i, _NONE) != first.get(i, _NONE))
    check.none_of(odd, "groups whose step is not the step of their first draw")


def check_prompts(groups: Groups, records: Records, store: ColumnReader) -> Check:
    """Check that no prompt was lost and none was handed out once too often."""
    total = int(groups.drawn.max(initial=0))
    before = np.concatenate(([0], groups.drawn[:-1]))
    fresh = groups.drawn > before
    dropped = groups.are(GroupState.DROPPED)
    prompts, place = np.unique(groups.prompt, return_inverse=True)
    again = np.bincount(place[~fresh], minlength=len(prompts))
    put_back = np.bincount(place[dropped], minlength=len(prompts))
    pending = np.maximum(put_back - again, 0)
    skipped = np.setdiff1d(np.arange(1, total + 1), groups.drawn[fresh])
    sampler = PromptSampler(*_orders(records.config, store))
    check = Check(
        "prompts",
        f"{total:,} drawn{_epochs(sampler, total)}: {np.count_nonzero(~dropped):,} groups have "
        f"them, {int(pending.sum()):,} to be handed out again, {len(skipped):,} left out",
    )
    back = groups.ids[groups.drawn < before]
    check.none_of(back, "groups that were admitted with fewer draws than the one before")
    check.none_of(prompts[again > put_back], "prompts that were handed out again without a drop")
    expected = np.array([sampler.index_at(n - 1) for n in groups.drawn[fresh].tolist()])
    check.none_of(
        groups.ids[fresh][groups.prompt[fresh] != expected],
        f"groups whose prompt is not the next one of seed={records.config['seed']}",
    )
    lines = read_json(records.run_dir / QUARANTINE_FILE).values()
    held = [line["prompt_index"] for line in lines if line["prompt_index"] is not None]
    unasked = [sampler.index_at(n - 1) for n in skipped.tolist()]
    left_out = np.setdiff1d(unasked, [*_asked_less(records, store), *held])
    check.none_of(left_out, "skipped prompts that were neither retired nor resting")
    if records.config["rollout.retire_above"] is None:
        forgotten = np.setdiff1d(prompts[_lost(groups, fresh, dropped, place, pending)], held)
        check.none_of(forgotten, "prompts that were put back and forgotten")
    return check


def _epochs(sampler: PromptSampler, total: int) -> str:
    """Say how often each source with an end was passed through after `total` draws."""
    passed = []
    for source, draws in zip(sampler.sources, sampler.draws_by_source(total)):
        if size := source.num_prompts:
            of = f" {source.name}" if source.name else ""
            passed.append(f"{draws // size:,} epochs of {size:,}{of} and {draws % size:,}")
    return f" ({'; '.join(passed)})" if passed else ""


def _orders(settings: Settings, store: ColumnReader) -> list[SourceOrder]:
    sizes = store.totals()
    orders = []
    for name, own in (settings["data.sources"] or {"": {}}).items():
        order = SourceOrder(None, settings["seed"], own.get("weight", 1), name)
        orders.append(replace(order, num_prompts=sizes.get(order.total_name)))
    return orders


def _asked_less(records: Records, store: ColumnReader) -> np.ndarray:
    """Return the prompts that may be left out, by the rewards of their groups.

    Two groups of a retired one were solved. No trajectory of a group of a resting one was.
    """
    given = [start["rollout.retire_above"] for start in records.starts]
    limits = [limit for limit in given if limit is not None]
    rests = any(start["rollout.rest_unsolved"] for start in records.starts)
    if not limits and not rests:
        return np.empty(0, np.int64)
    rates: dict[int, list[float]] = {}
    for index, rate in store.solved_shares():
        rates.setdefault(index, []).append(rate)
    several = {index: sorted(found) for index, found in rates.items() if len(found) > 1}
    least = min(limits, default=np.inf)
    retired = [index for index, found in several.items() if sum(found[-2:]) / 2 > least]
    resting = [index for index, found in rates.items() if rests and 0 in found]
    return np.array(retired + resting, np.int64)


def _lost(
    groups: Groups, fresh: np.ndarray, dropped: np.ndarray, place: np.ndarray, pending: np.ndarray
) -> np.ndarray:
    """Tell which prompts wait to be handed out again although new ones were drawn, bool [m]."""
    last_drop = np.full(len(pending), np.inf)
    last_drop[place[dropped]] = -np.inf
    np.maximum.at(last_drop, place[dropped], groups.finished[dropped])
    newest = groups.admitted[fresh].max(initial=-np.inf)
    return (pending > 0) & (last_drop + _COMMIT_S < newest)


def check_trajectories(table: Columns) -> list[Check]:
    """Check each trajectory by itself, and that no two groups have the same one."""
    found = f"{len(table):,} trajectories"
    check = Check("versions", f"{found}: versions never decrease, and segments fit their tokens")
    for what, wrong in _violations(table).items():
        columns = (column[wrong] for column in (table.group, table.sample, table.trace))
        check.none_of([f"{group}/{trace_name(*trace)}" for group, *trace in zip(*columns)], what)
    orphans = np.setdiff1d(table.group, table.groups.ids)
    check.none_of(orphans, "trajectories of groups that have no row")
    return [check, _check_copies(table)]


def _check_copies(table: Columns) -> Check:
    used = table.step >= 0
    # Two trajectories never start and end at the same times, to a part of a microsecond.
    lives, groups = (table.started + 1j * table.finished)[used], table.group[used]
    order = np.argsort(lives, kind="stable")
    lives, groups = lives[order], groups[order]
    same = (lives[1:] == lives[:-1]) & (groups[1:] != groups[:-1])
    pairs = np.stack([groups[:-1], groups[1:]])[:, same]
    found = f"{len(lives):,} trajectories that were trained on"
    check = Check("copies", f"{found}: no two are the same")
    equal = {f"{min(pair)} = {max(pair)}" for pair in pairs.T.tolist()}
    check.none_of(sorted(equal), "pairs of groups with the same trajectory")
    return check


def _violations(table: Columns) -> dict[str, np.ndarray]:
    """Map each fault to the trajectories that have it, bool [n]."""
    n = len(table)
    next_to = table.owner[1:] == table.owner[:-1]
    back = next_to & (table.version[1:] < table.version[:-1])
    overlap = next_to & (table.start[1:] < table.end[:-1])
    first = np.searchsorted(table.owner, np.arange(n))
    last = np.searchsorted(table.owner, np.arange(n), side="right") - 1
    has = last >= first
    summary = np.zeros(n, bool)
    summary[has] = (
        (table.version[first[has]] != table.oldest[has])
        | (table.version[last[has]] != table.newest[has])
        | (table.start[first[has]] != table.prompt[has])
    )
    summary |= (last - first + 1) != table.num_segments
    outside = (table.start >= table.end) | (table.end > table.tokens[table.owner])
    return {
        "trajectories whose versions go back": _owners(table.owner[1:][back], n),
        "trajectories whose segments overlap": _owners(table.owner[1:][overlap], n),
        "trajectories with a segment outside of their tokens": _owners(table.owner[outside], n),
        "trajectories without a version": _owners(table.owner[table.version < 0], n),
        "trajectories whose columns contradict their segments": summary,
        "trajectories that were trained on without a reward": (table.step >= 0)
        & np.isnan(table.reward),
    }


def _owners(indices: np.ndarray, n: int) -> np.ndarray:
    return np.bincount(indices, minlength=n).astype(bool)


def check_rows(store: ColumnReader) -> Check:
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
    check = Check("tokens", f"{total:,} trajectories: checksums, log-probs, versions")
    if without:
        check.looked_at += f"; {NOT_KEPT}: {without:,}"
    check.none_of(damaged, "trajectories that are damaged")
    return check
