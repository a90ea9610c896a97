"""Checks that a comparison of runs is one: what silently spoils such studies.

The four kinds are those of Probe the Harness (arXiv 2610.02911): a clip that never acts, a seed
that does not reach the data, a batch that comes again, and a normalizer that counts something else.
"""

import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

_USED = "SELECT group_id, prompt_id, step FROM groups WHERE state = 'used' ORDER BY group_id"
_TOKENS = """
SELECT g.step, t.versions FROM trajectories t JOIN groups g USING (group_id) WHERE g.state = 'used'
"""


def check_run(store: Path, metrics: list[dict], groups_per_step: int) -> int:
    """Check one run by its store, and return a checksum of its prompts in their order.

    Raises ValueError for a batch that came again, and for a loss over other tokens than sampled.
    """
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
        used = db.execute(_USED).fetchall()
        sampled: dict[int, int] = defaultdict(int)
        for step, versions in db.execute(_TOKENS):
            sampled[step] += int((np.frombuffer(versions, np.int32) >= 0).sum())
    by_step: dict[int, list[str]] = defaultdict(list)
    for _, prompt, step in used:
        by_step[step].append(prompt)
    for number, row in enumerate(metrics):
        prompts = by_step[number]
        if len(prompts) != groups_per_step:
            raise ValueError(f"step {number + 1} used {len(prompts)} groups: {groups_per_step}")
        if number and prompts == by_step[number - 1]:
            raise ValueError(f"stuck batch: steps {number} and {number + 1} have the same prompts")
        if row["trained_tokens"] != sampled[number]:
            raise ValueError(
                f"rogue normalizer: step {number + 1} divides by {row['trained_tokens']:.0f} "
                f"tokens, and {sampled[number]} were sampled"
            )
    return zlib.crc32("\n".join(prompt for _, prompt, _ in used).encode())


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
