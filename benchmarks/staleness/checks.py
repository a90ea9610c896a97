"""Checks that a comparison of runs is one: what silently spoils such studies.

The four kinds are those of Probe the Harness (arXiv 2610.02911): a clip that never acts, a seed
that does not reach the data, a batch that comes again, and a normalizer that counts something else.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store_format import TRACE, unpack
from areal_lite.tools.report.run_data import Columns, read_columns

_BATCHES = 5  # pairs of alike batches that are compared token by token
_GROUPS = 100  # whose samples are compared
UNLIKELY = -20.0  # a chance of 2e-9, in nats
_MASKED = ("masked_truncated", "masked_overdue", "masked_nonfinite")


class SampleReader(RunReader):
    """A reader of the tokens of groups."""

    def arrays(self, group_id: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield tokens, int32 [L], and log-probs, float32 [L], of the group's kept trajectories."""
        for length, tokens, logprobs in self._query(
            f"SELECT n_tokens, tokens, logprobs FROM trajectories JOIN sequences USING ({TRACE}) "
            "WHERE group_id = ? ORDER BY sample_index, trace_index",
            (group_id,),
        ):
            yield unpack(tokens, np.int32, length), unpack(logprobs, np.float32, length)

    def samples(self, group: int) -> Iterator[tuple[bytes, float]]:
        """Yield the tokens of each sample of a group and its log-probability, in nats."""
        for tokens, logprobs in self.arrays(group):
            yield tokens.tobytes(), float(np.nansum(logprobs.astype(np.float64)))


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
        or repeated_batch(columns, store)
        or stuck_metrics(columns, metrics),
        "rogue normalizer": rogue_tokens(columns, metrics),
        "lost seed": repeated_samples(columns, store),
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


def repeated_batch(columns: Columns, store: Path) -> str | None:
    """Find a step that repeats the trajectories of the step before, token for token.

    Steps whose tokens are not kept are left out.
    """
    steps = np.argsort(columns.step, kind="stable")
    first = np.searchsorted(columns.step[steps], np.arange(columns.step.max(initial=-1) + 2))
    rows = [steps[start:end] for start, end in pairwise(first)]
    kept = columns.kept
    alike = [
        number
        for number, (before, after) in enumerate(pairwise(rows), start=1)
        if len(after)
        and kept[before].all()
        and kept[after].all()
        and np.array_equal(columns.sampled[before], columns.sampled[after])
        and np.array_equal(columns.reward[before], columns.reward[after], equal_nan=True)
    ]
    with closing(SampleReader(store)) as reader:
        for number in alike[-_BATCHES:]:
            before, after = (np.unique(columns.group[rows[n]]) for n in (number - 1, number))
            equal, chance = _compare(reader, before.tolist(), after.tolist())
            if equal and chance < UNLIKELY:
                text = f"steps {number} and {number + 1} have the same {len(rows[number])} samples"
                return f"{text}, {probability(chance)}"
    return None


def stuck_metrics(columns: Columns, metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """Find a step that reports the tokens and rewards of the step before, not of its batch."""
    tokens, rewards = _by_step(columns)
    for row in metrics:
        step = row["step"] - 1
        if not 1 <= step < len(tokens) or not tokens[step] or row["reward_mean"] is None:
            continue
        reported = (row["tokens"], row["reward_mean"])
        if not _near(reported, (tokens[step], rewards[step])) and _near(
            reported, (tokens[step - 1], rewards[step - 1])
        ):
            return (
                f"step {step + 1} reports {reported[0]:,.0f} tokens and a mean reward of "
                f"{reported[1]:.4g}, as the batch of step {step} has; its own batch in the store "
                f"has {tokens[step]:,.0f} and {rewards[step]:.4g}"
            )
    return None


def rogue_tokens(columns: Columns, metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """Find a step whose loss counts other tokens than were sampled for it and not masked."""
    tokens, _ = _by_step(columns)
    for row in metrics:
        step = row["step"] - 1
        if step >= len(tokens) or not tokens[step] or row.get("trained_tokens") is None:
            continue
        masked = sum(row.get(key) or 0.0 for key in _MASKED)
        if row["trained_tokens"] + masked != tokens[step]:
            return (
                f"step {step + 1} divides by {row['trained_tokens']:,.0f} tokens and masks "
                f"{masked:,.0f}, and {tokens[step]:,.0f} were sampled"
            )
    return None


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


def _by_step(columns: Columns) -> tuple[list[float], list[float]]:
    """Return the sampled tokens and the mean reward of each step."""
    used = columns.step >= 0
    step = columns.step[used]
    tokens = np.bincount(step, columns.sampled[used])
    rewards = np.bincount(step, columns.reward[used])
    return tokens.tolist(), (rewards / np.maximum(np.bincount(step), 1)).tolist()


def _near(reported: tuple[float, float], stored: tuple[float, float]) -> bool:
    return reported[0] == stored[0] and bool(np.isclose(reported[1], stored[1], atol=1e-9))


def _compare(reader: SampleReader, one: list[int], two: list[int]) -> tuple[bool, float]:
    """Return whether two batches have equal tokens, and the log-probability of the second."""
    if len(one) != len(two):
        return False, 0.0
    chance = 0.0
    for before, after in zip(one, two, strict=True):
        for (tokens, _), (others, logprob) in zip(reader.samples(before), reader.samples(after)):
            if tokens != others:
                return False, 0.0
            chance += logprob
    return True, chance


def repeated_samples(columns: Columns, store: Path) -> str | None:
    """Find a group whose samples are the same although that is unlikely.

    Groups whose tokens are not kept are left out.
    """
    used = np.flatnonzero((columns.step >= 0) & columns.kept)
    groups, first, size = np.unique(columns.group[used], return_index=True, return_counts=True)
    shortest = np.minimum.reduceat(columns.sampled[used], first) if len(used) else first
    longest = np.maximum.reduceat(columns.sampled[used], first) if len(used) else first
    alike = np.flatnonzero((size > 1) & (shortest == longest))[-_GROUPS:]
    found: list[tuple[int, int, float]] = []
    with closing(SampleReader(store)) as reader:
        for index in alike.tolist():
            samples = list(reader.samples(int(groups[index])))
            # A run may have removed the tokens meanwhile.
            chance = (len(samples) - 1) * samples[0][1] if samples else 0.0
            if len({tokens for tokens, _ in samples}) == 1 and chance < UNLIKELY:
                found.append((index, len(samples), chance))
    if not found:
        return None
    index, samples, chance = found[0]
    step = int(columns.step[used][first[index]]) + 1
    return (
        f"{len(found)} of the newest {len(alike)} groups of equal lengths have equal samples; "
        f"group {groups[index]} of step {step}: {samples} times the same tokens, "
        f"{probability(chance)}"
    )


def probability(chance: float) -> str:
    """Write a log-probability, in nats, as a power of ten."""
    return f"which has a probability of 1e{chance / np.log(10):.0f} by chance"
