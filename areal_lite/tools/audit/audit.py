"""Prove from the files of a run that nothing was lost and nothing was used twice.

| check | what it shows |
|---|---|
| groups | ids without gaps, states that agree with their columns, all trajectories there |
| prompts | every prompt of an epoch was handed out in its order and counts once |
| versions | in a trajectory they never decrease, and its columns agree with its segments |
| copies | no trajectory is in two groups that were trained on |
| batches | each step used one batch; store, metrics.jsonl and checkpoints end at the same step |
| staleness | no token that was trained on is older than the bound, or newer than the servers |
| metrics | each step has one row, and the store gives the same tokens, rewards and staleness |
| trained | the trainer's own record names groups that the store says it used |
| evaluations | each is there once, in order |
| checkpoints | every file has its checksum |
| counts | what the controller counted over the whole run is what the store shows |
| tokens | on request: every row has its checksum, and its arrays fit each other token by token |

A group may have lost its tokens (`store.max_gib`), which `groups` checks: only where nothing needs
them. Its rows remain, and every other check is of these.

It holds some numbers for each group and each trajectory that was trained on, about 120 bytes, and
reads the columns of the store in chunks.
"""

from __future__ import annotations

from pathlib import Path

from areal_lite.run_dir.reader import RunReader
from areal_lite.tools.audit.files import (
    StepSums,
    check_checkpoints,
    check_counts,
    check_evaluations,
    check_metrics,
    check_trained,
)
from areal_lite.tools.audit.records import Check, Records, open_records
from areal_lite.tools.audit.store import (
    COLUMNS,
    Shapes,
    check_groups,
    check_prompts,
    check_rows,
    check_use,
)
from areal_lite.tools.commands import AuditConfig
from areal_lite.tools.formatting import counted
from areal_lite.tools.report.command import existing_run


def audit(run_dir: Path, tokens: bool = False) -> list[Check]:
    """Check a run that ended, was killed or is still going.

    `tokens` also checks every row of the store token by token. Raises ValueError for a directory
    without a training run, and for a store that cannot be read.
    """
    with open_records(run_dir) as records:
        return _checks(records, tokens)


def _checks(records: Records, tokens: bool) -> list[Check]:
    files = [check_evaluations(records), check_checkpoints(records)]
    if records.store is None:
        return [check_metrics(records, None), *files]
    checks = _checks_of_store(records, records.store, tokens)
    return [*checks[:-1], *files, checks[-1]]


def _checks_of_store(records: Records, store: RunReader, tokens: bool) -> list[Check]:
    groups = store.group_table()
    shapes = Shapes(groups.ids)
    sums = StepSums(records, int(groups.step.max(initial=-1)) + 1)
    for chunk in store.chunks(COLUMNS):
        shapes.add(chunk)
        if not records.replays:
            sums.add(chunk)
    if records.replays:
        for chunk in store.chunks(COLUMNS, drawn=True):
            sums.add(chunk)
    return [
        check_groups(groups, shapes.found, records, store),
        check_prompts(groups, records, store),
        *shapes.checks(),
        *([check_rows(store)] if tokens else []),
        check_use(groups, records, store),
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
        lines.append(
            f"{'off' if check.wrong else 'ok':<4} {check.name:<{width}}  {check.looked_at}"
        )
        lines += [f"{'':<{width + 6}} {wrong}" for wrong in check.wrong]
    off = sum(bool(check.wrong) for check in checks)
    result = f"{counted(off, 'check')} off" if off else f"all {len(checks)} checks ok"
    return "\n".join([f"{run_dir}: {result}", "", *lines])


def run(config: AuditConfig) -> int:
    """Print the checks of a run; return 1 if one of them is off."""
    run_dir = existing_run(config.run_dir)
    checks = audit(run_dir, config.tokens)
    print(audit_text(run_dir, checks))
    return int(any(check.wrong for check in checks))
