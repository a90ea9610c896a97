"""The other files of a run: checkpoints, evaluations, the trainer's record, and the counts."""

from __future__ import annotations

import re
from typing import Any

from areal_lite.run_dir.manifest import damage
from areal_lite.run_dir.paths import (
    CHECKPOINTS_DIR,
    HF_DIR,
    PROXIMAL_FILE,
    SUMMARY_FILE,
    TOTALS_FILE,
)
from areal_lite.run_dir.reader import Groups, RunReader
from areal_lite.tools.audit.check import Check, count
from areal_lite.tools.audit.records import Records
from areal_lite.tools.audit.steps import StepSums
from areal_lite.trajectory import GroupState

_PROXIMAL = re.compile(rb'\{"step": (\d+), "group_id": (\d+),')


def check_checkpoints(records: Records) -> Check:
    """Check every file of every checkpoint by its checksum."""
    folder = records.run_dir / CHECKPOINTS_DIR
    paths = [folder / f"step-{step}" for step in records.checkpoints]
    if (folder / HF_DIR).is_dir():
        paths.append(folder / HF_DIR)
    aside = len(list(folder.glob("step-*.damaged")))
    check = Check(
        name="checkpoints",
        looked_at=f"{', '.join(path.name for path in paths) or 'none'}: every file has its checksum"
        + (f"; {aside} set aside as damaged" if aside else ""),
    )
    for path in paths:
        reason = damage(path)
        # A running run removes old ones.
        if reason and path.exists():
            check.wrong.append(f"{path.name}: {reason}")
    return check


def check_evaluations(records: Records) -> Check:
    """Check that each evaluation was logged once, in order, and that none is missing."""
    versions = [record["version"] for record in records.evals]
    check = Check(name="evaluations", looked_at=f"{len(versions):,}, each once and in order")
    check.expect(
        all(a < b for a, b in zip(versions, versions[1:])), f"their versions are {versions}"
    )
    older = [
        record["version"]
        for record in records.evals
        if any(version < record["version"] for version in record.get("versions", []))
    ]
    check.none_of(older, "evaluations with answers of older weights")
    config = records.config
    if config.eval_problems and config.eval_every and len(records.starts) == 1 and versions:
        due = _due(records)
        check.none_of(sorted(due - set(versions)), "versions that were due and are missing")
    return check


def _due(records: Records) -> set[int]:
    """Return the versions before the newest evaluation that had to be evaluated."""
    every = records.config.eval_every
    pushed = [row["version"] for row in records.metrics if row.get("version") == row.get("step")]
    newest = max(record["version"] for record in records.evals)
    before = [0, *pushed]
    return {
        version
        for last, version in zip(before, pushed)
        if version // every > last // every and version < newest
    }


def check_trained(groups: Groups, records: Records) -> Check:
    """Check that the trainer trained on what the store says, by its record of one group a step."""
    path = records.run_dir / PROXIMAL_FILE
    trained: dict[int, int] = {}
    if path.exists():
        with open(path, "rb") as file:
            for line in file:
                if found := _PROXIMAL.match(line):
                    trained[int(found[1])] = int(found[2])  # a step that was lost is there twice
    used = dict(zip(groups.ids.tolist(), groups.step.tolist()))
    steps = int(groups.step.max(initial=-1)) + 1
    known = {step: group for step, group in trained.items() if step < steps}
    check = Check(
        name="trained",
        looked_at=f"{count(len(known), 'step')}: the trainer names a group of that step",
    )
    if not records.replays:
        wrong = [
            f"{step + 1} ({group})" for step, group in known.items() if used.get(group) != step
        ]
        check.none_of(wrong, "steps that were trained on a group of another step")
    return check


def check_counts(groups: Groups, sums: StepSums, store: RunReader, records: Records) -> Check:
    """Check the counts of the run at its end against the store."""
    check = Check(name="counts", looked_at="none: they are written when the run ends")
    if records.totals or records.summary:
        check.looked_at = "groups, failures and tokens of the whole run, as in the store"
    totals: dict[str, Any] = {
        "trajectories_lost": 0,
        "groups": {state.value: groups.number(state) for state in GroupState},
        "filtered": dict(store.filtered()),
        **store.failures(),
    }
    for file, found, made in (
        (TOTALS_FILE, records.totals, totals),
        (SUMMARY_FILE, records.summary, _of_summary(records, sums)),
    ):
        for name, value in made.items():
            if found.get(name, value) != value:
                check.wrong.append(f"{file}: {name} is {found[name]}, the store gives {value}")
    return check


def _of_summary(records: Records, sums: StepSums) -> dict[str, int]:
    """Return the counts of summary.json that the store shows; none for a run with replay."""
    if records.replays:
        return {}
    return {
        "steps": len(records.metrics),
        "trajectories_lost": 0,
        "trajectories": int(sums.trajectories.sum()),
        "tokens": int(sums.tokens.sum()),
        "max_staleness": int(sums.stalest[-1].max(initial=0)),
    }
