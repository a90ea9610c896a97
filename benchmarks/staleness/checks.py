"""Checks that a comparison of runs is one: what silently spoils such studies.

The four kinds are those of Probe the Harness (arXiv 2610.02911): a clip that never acts, a seed
that does not reach the data, a batch that comes again, and a normalizer that counts something else.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np

from areal_lite.run_dir.reader import RunReader
from areal_lite.tools.diagnose import failures
from areal_lite.tools.report.run_data import Columns, read_columns


def check_run(store: Path, metrics: list[dict], groups_per_step: int) -> int:
    """Check one run by its store, and return a checksum of its prompts in their order.

    Raises ValueError for a batch that came again, for samples that are the same although that is
    unlikely, and for a loss over other tokens than sampled.
    """
    columns = read_columns(store)
    step = columns.groups.step
    used = np.bincount(step[step >= 0], minlength=len(metrics))
    for number, groups in enumerate(used[: len(metrics)].tolist(), start=1):
        if groups != groups_per_step:
            raise ValueError(f"step {number} used {groups} groups: {groups_per_step}")
    faults = {
        # Each prompt of the study comes once.
        "stuck batch": repeated_prompts(columns)
        or failures.repeated_batch(columns, store)
        or failures.stuck_metrics(columns, metrics),
        "rogue normalizer": failures.rogue_tokens(columns, metrics),
        "lost seed": failures.repeated_samples(columns, store),
    }
    for kind, fault in faults.items():
        if fault:
            raise ValueError(f"{kind}: {fault}")
    return prompt_order(store)


def check_study(records: Iterable[dict]) -> None:
    """Check the records of a study against each other.

    Raises ValueError for a seed whose runs saw other prompts, for two seeds that saw the same, and
    for a clip that never acted although a step has several updates.
    """
    prompts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for record in records:
        prompts[record["seed"], record["steps"]].add(record["prompts"])
        if record["minibatches"] > 1 and not record["clip_fraction"]:
            raise ValueError(f"idle clip: {record['name']} clipped no token")
    for (seed, _), found in prompts.items():
        if len(found) > 1:
            raise ValueError(f"lost seed: the runs of seed {seed} saw different prompts")
    if len({next(iter(found)) for found in prompts.values()}) < len(prompts):
        raise ValueError("lost seed: two seeds saw the same prompts")


def repeated_prompts(columns: Columns) -> str | None:
    """Find a step with the prompts of the step before, in the same order."""
    for (_, before), (step, prompts) in pairwise(_prompts_by_step(columns)):
        if np.array_equal(before, prompts):
            return f"steps {step} and {step + 1} have the same prompts"
    return None


def prompt_order(store: Path) -> int:
    """Return a checksum of the ids of all used prompts in their order, to compare runs."""
    checksum, between = 0, b""
    with closing(RunReader(store)) as reader:
        for group in reader.groups():
            if group["state"] == "used":
                checksum = zlib.crc32(between + group["prompt_id"].encode(), checksum)
                between = b"\n"
    return checksum


def _prompts_by_step(columns: Columns) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each step, from 0, and the indices of its prompts in the order of admission."""
    order = np.argsort(columns.groups.step, kind="stable")
    steps, prompts = columns.groups.step[order], columns.groups.prompt[order]
    found, first = np.unique(steps, return_index=True)
    for step, own in zip(found.tolist(), np.split(prompts, first[1:])):
        if step >= 0:
            yield step, own
