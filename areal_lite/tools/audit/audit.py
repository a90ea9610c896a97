"""Prove from the files of a run that nothing was lost and nothing was used twice.

| check | what it shows |
|---|---|
| groups | ids without gaps, states that agree with their columns, all trajectories there |
| prompts | every prompt of an epoch was handed out in its order and counts once |
| versions | in a trajectory they never decrease, and its columns agree with its segments |
| copies | no trajectory is in two groups that were trained on |
| batches | each step used one batch; store, metrics.jsonl and checkpoints end at the same step |
| staleness | no token that was trained on is older than the bound, or newer than the servers |
| metrics | each step has one row; the store gives the same tokens, rewards, staleness and masks |
| trained | the trainer's own record names groups that the store says it used |
| evaluations | each appears once, in order |
| checkpoints | every file has its checksum |
| counts | what the controller counted over the whole run is what the store shows |
| tokens | on request: every row has its checksum, and its arrays fit each other token by token |

A group may have lost its tokens (`store.max_gib`), which `groups` checks: only where nothing needs
them. Its rows remain, and every other check is of these.

It holds the columns of the store, about 150 bytes for each trajectory.
"""

import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.run_dir import paths
from areal_lite.run_dir.resume import damage
from areal_lite.tools.audit import store as stored
from areal_lite.tools.audit.records import Check, Records, open_records
from areal_lite.tools.commands import DiagnoseConfig, existing_run, no_traceback
from areal_lite.tools.formatting import counted
from areal_lite.tools.store_columns import ColumnReader, Columns, Groups
from areal_lite.trajectory import GroupState

# A sum of float64 in another order.
_TOLERANCE = 1e-9
# Tokens that the loss leaves out. The others are those that it counts.
_MASKED = ("masked_truncated", "masked_overdue", "masked_nonfinite")
_PROXIMAL = re.compile(rb'\{"step": (\d+), "group_id": (\d+),')


class StepSums:
    """Adds up the trajectories that each step was trained on.

    With a bound on staleness, older tokens are overdue: they were masked. The bound may differ
    between the starts of a run, so each of `bounds` has sums of its own.
    """

    def __init__(self, records: Records, table: Columns, steps: int):
        """Take the trajectories, and the number of completed steps."""
        used = table.step >= 0
        episode = np.cumsum(table.trace == 0)  # of each trajectory
        step, share = table.step[used], 1 / np.bincount(episode)[episode[used]]
        self.trajectories = np.bincount(step, minlength=steps)
        self.episodes = np.bincount(step, share, steps)
        self.rewards = np.bincount(step, share * np.nan_to_num(table.reward[used]), steps)
        of_used = used[table.owner]
        owner, version = table.owner[of_used], table.version[of_used]
        length = table.length[of_used]
        group, step = table.group[owner], table.step[owner]
        staleness = step - version
        self.tokens = np.bincount(step, length, steps).astype(np.int64)
        bounds = {start["buffer.max_staleness"] for start in records.starts}
        self.bounds = [2**30] if records.replays else sorted(bounds)
        # By bound.
        self.within, self.staleness, self.stalest = np.zeros((3, len(self.bounds), steps), np.int64)
        for i, bound in enumerate(self.bounds):
            good = staleness <= bound
            tokens = np.where(good, length, 0)
            self.within[i] = np.bincount(step, tokens, steps)
            self.staleness[i] = np.bincount(step, tokens * staleness, steps)
            np.maximum.at(self.stalest[i], step[good], staleness[good])
        # A token that is overdue can be in a batch, where it is masked.
        may_mask = any(start["buffer.window"] is None for start in records.starts)
        self._overdue = set() if may_mask else set(group[staleness > self.bounds[-1]].tolist())
        # The newest version that the servers can have had at each step.
        lags = {m["step"]: m.get("server_lag", 0) for m in records.metrics}
        newest = np.array([step - lags.get(step + 1, 0) for step in range(steps)], np.int64)
        self._too_new = set(group[version > newest[step]].tolist())

    def check(self, records: Records) -> Check:
        """Return what is wrong with the versions of the tokens that were trained on."""
        bound = self.bounds[-1]
        total, ages = int(self.tokens.sum()), "of any age (replay), none newer"
        if not records.replays:
            masked = total - int(self.within[-1].sum())
            ages = (
                f"at most {int(self.stalest[-1].max(initial=0))} steps old, "
                f"buffer.max_staleness={bound}; {masked:,} older ones were masked"
            )
        check = Check("staleness", f"{total:,} tokens that were trained on: {ages}")
        what = f"groups with tokens more than {bound} steps old, in a run that masks none"
        check.none_of(sorted(self._overdue), what)
        what = "groups with a version that no server had before their step"
        check.none_of(sorted(self._too_new), what)
        return check


def check_metrics(records: Records, sums: StepSums | None) -> Check:
    """Check that metrics.jsonl has each step once, and that the store gives the same numbers."""
    rows = records.metrics
    numbers = [row["step"] for row in rows]
    times = Counter(numbers)
    check = Check("metrics", f"{counted(len(rows), 'row')}: each step once")
    check.none_of([step for step in times if times[step] > 1], "steps with more than one row")
    missing = set(range(1, max(numbers, default=0))) - set(times)
    check.none_of(sorted(missing), "steps without a row")
    check.expect(numbers == sorted(numbers), "rows out of order")
    _check_versions(check, records)
    if sums is None:
        return check
    check.looked_at += ", and tokens, rewards and staleness as in the store"
    for row in rows:
        known = 0 < row["step"] <= len(sums.tokens)
        if known and (wrong := _differences(row, sums, records.replays)):
            check.wrong.append(f"step {row['step']}: {'; '.join(wrong)}")
    return check


def _check_versions(check: Check, records: Records) -> None:
    every = [start["sync.every"] for start in records.starts]
    known = [(row["step"], row["version"]) for row in records.metrics if "version" in row]
    goes_back = any(before > after for (_, before), (_, after) in pairwise(known))
    check.expect(not goes_back, "the version of the servers went back")
    late = [
        step
        for step, version in known
        if not max(step - max(every) + 1, 0) <= version <= step
        or (version < step and not any(step % n for n in every))
    ]
    check.none_of(late, f"steps without their push (sync.every={max(every)})")


def _differences(row: dict[str, Any], sums: StepSums, replays: bool) -> list[str]:
    """Say where a row of metrics.jsonl differs from the store, for the bound that fits best."""
    found, step = [], int(row["step"]) - 1
    for i in range(len(sums.bounds)):
        tokens, within = int(sums.tokens[step]), int(sums.within[i][step])
        episodes = max(1.0, sums.episodes[step])
        made: dict[str, float] = {
            "trajectories": int(sums.trajectories[step]),
            "tokens": tokens,
            "traces_mean": sums.trajectories[step] / episodes,
            "reward_mean": sums.rewards[step] / episodes,
            "staleness_mean": sums.staleness[i][step] / within if within else 0.0,
            "staleness_max": int(sums.stalest[i][step]),
        }
        if row.get("trained_tokens") is not None and not replays:
            made["trained_tokens"] = tokens - sum(row.get(key) or 0 for key in _MASKED)
        # A token without a finite log-prob is not counted as masked.
        if not row.get("nonfinite_tokens"):
            made["masked_tokens"] = tokens - within
        found.append(
            [
                f"{key} is {row[key]}, the store gives {value:.6g}"
                for key, value in made.items()
                if row.get(key) is not None
                and not math.isclose(row[key], value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
            ]
        )
    return min(found, key=len)


def check_checkpoints(records: Records) -> Check:
    """Check every file of every checkpoint by its checksum."""
    folder = records.run_dir / paths.CHECKPOINTS_DIR
    folders = [folder / f"step-{step}" for step in records.checkpoints]
    if (folder / paths.HF_DIR).is_dir():
        folders.append(folder / paths.HF_DIR)
    found = ", ".join(path.name for path in folders) or "none"
    check = Check("checkpoints", f"{found}: every file has its checksum")
    if aside := len(list(folder.glob("step-*.damaged"))):
        check.looked_at += f"; {aside} set aside as damaged"
    for path in folders:
        reason = damage(path)
        # A running run removes old ones.
        if reason and path.exists():
            check.wrong.append(f"{path.name}: {reason}")
    return check


def check_evaluations(records: Records) -> Check:
    """Check that each evaluation was logged once, in order, and that none is missing."""
    versions = [record["version"] for record in records.evals]
    check = Check("evaluations", f"{len(versions):,}, each once and in order")
    check.expect(all(a < b for a, b in pairwise(versions)), f"their versions are {versions}")
    evals = ((record["version"], record.get("versions", [])) for record in records.evals)
    older = [version for version, by in evals if min(by, default=version) < version]
    check.none_of(older, "evaluations with answers of older weights")
    config = records.config
    if config["eval.problems"] and config["eval.every"] and len(records.starts) == 1 and versions:
        due = _due(records)
        check.none_of(sorted(due - set(versions)), "versions that were due and are missing")
    return check


def _due(records: Records) -> set[int]:
    """Return the versions before the newest evaluation that had to be evaluated."""
    every = records.config["eval.every"]
    pushed = [row["version"] for row in records.metrics if row.get("version") == row["step"]]
    newest = max(record["version"] for record in records.evals)
    pairs = pairwise([0, *pushed])
    return {after for before, after in pairs if after // every > before // every and after < newest}


def check_trained(groups: Groups, records: Records) -> Check:
    """Check that the trainer trained on what the store says, by its record of one group a step."""
    path = records.run_dir / paths.PROXIMAL_FILE
    trained: dict[int, int] = {}
    if path.exists():
        with open(path, "rb") as file:
            for line in file:
                if found := _PROXIMAL.match(line):
                    trained[int(found[1])] = int(found[2])  # a lost step appears twice
    used = dict(zip(groups.ids.tolist(), groups.step.tolist()))
    steps = int(groups.step.max(initial=-1)) + 1
    known = {step: group for step, group in trained.items() if step < steps}
    steps_named = counted(len(known), "step")
    check = Check("trained", f"{steps_named}: the trainer names a group of that step")
    if not records.replays:
        wrong = [f"{step + 1} ({g})" for step, g in known.items() if used.get(g) != step]
        check.none_of(wrong, "steps that were trained on a group of another step")
    return check


def check_counts(groups: Groups, sums: StepSums, store: ColumnReader, records: Records) -> Check:
    """Check the counts of the run at its end against the store."""
    check = Check("counts", "none: they are written when the run ends")
    if records.totals or records.summary:
        check.looked_at = "groups, failures and tokens of the whole run, as in the store"
    totals: dict[str, Any] = {
        "trajectories_lost": 0,
        "groups": {state.value: groups.number(state) for state in GroupState},
        "filtered": dict(store.filtered()),
        **store.failures(),
    }
    summary = {
        "steps": len(records.metrics),
        "trajectories_lost": 0,
        "trajectories": int(sums.trajectories.sum()),
        "tokens": int(sums.tokens.sum()),
        "max_staleness": int(sums.stalest[-1].max(initial=0)),
    }
    for file, found, made in (
        (paths.TOTALS_FILE, records.totals, totals),
        # With a replay buffer the store shows none of these counts.
        (paths.SUMMARY_FILE, records.summary, {} if records.replays else summary),
    ):
        for name, value in made.items():
            if found.get(name, value) != value:
                check.wrong.append(f"{file}: {name} is {found[name]}, the store gives {value}")
    return check


def audit(run_dir: Path, tokens: bool = False) -> list[Check]:
    """Check a run that ended, was killed or is still going.

    `tokens` also checks every row of the store token by token. Raises ValueError for a directory
    without a training run, and for a store that cannot be read.
    """
    with open_records(run_dir) as records:
        files = [check_evaluations(records), check_checkpoints(records)]
        if records.store is None:
            return [check_metrics(records, None), *files]
        *checks, last = _checks_of_store(records, records.store, tokens)
        return [*checks, *files, last]


def _checks_of_store(records: Records, store: ColumnReader, tokens: bool) -> list[Check]:
    table = trained = store.columns()
    groups = table.groups
    newest = groups.step.max(initial=-1)
    if records.replays:
        trained = store.columns(drawn=True)
        newest = max(store.draw_counts(), default=-1)
    sums = StepSums(records, trained, int(newest) + 1)
    return [
        stored.check_groups(table, records, store),
        stored.check_prompts(groups, records, store),
        *stored.check_trajectories(table),
        *([stored.check_rows(store)] if tokens else []),
        stored.check_use(groups, records, store),
        sums.check(records),
        check_metrics(records, sums),
        check_trained(groups, records),
        check_counts(groups, sums, store, records),
    ]


def audit_text(run_dir: Path, checks: list[Check]) -> str:
    """Write the checks as text for a terminal: a line each, and a line for each thing wrong."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        state = "off" if check.wrong else "ok"
        lines.append(f"{state:<4} {check.name:<{width}}  {check.looked_at}")
        lines += [f"{'':<{width + 6}} {wrong}" for wrong in check.wrong]
    off = sum(bool(check.wrong) for check in checks)
    result = f"{counted(off, 'check')} off" if off else f"all {len(checks)} checks ok"
    return "\n".join([f"{run_dir}: {result}", "", *lines])


@no_traceback()
def run(config: DiagnoseConfig) -> int:
    """Print the checks of a run; return 1 if one of them is off."""
    run_dir = existing_run(config.run_dir)
    checks = audit(run_dir, config.tokens)
    print(audit_text(run_dir, checks))
    return int(any(check.wrong for check in checks))
