"""The prompts: every prompt of an epoch was handed out, and counts once.

A group that raises `drawn` has a new prompt, the next one of the sampler's order. One that does not
has a prompt that was put back: each dropped group puts its prompt back once. Hence

    prompts drawn = used + filtered + waiting + in flight + put back and not yet handed out again
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from areal_lite.data.sampler import PromptSampler, SourceOrder
from areal_lite.run_dir.reader import Groups, RunReader
from areal_lite.tools.audit.check import Check
from areal_lite.tools.audit.records import Records
from areal_lite.tools.audit.settings import Settings
from areal_lite.trajectory import GroupState

# A prompt that was put back is the next one to be handed out. While its drop is committed, others
# may still be drawn.
_COMMIT_S = 60.0


def check_prompts(groups: Groups, records: Records, store: RunReader) -> Check:
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
        name="prompts",
        looked_at=f"{total:,} drawn{_epochs(sampler, total)}: "
        f"{np.count_nonzero(~dropped):,} groups have them, "
        f"{int(pending.sum()):,} to be handed out again, {len(skipped):,} left out",
    )
    back = groups.ids[groups.drawn < before].tolist()
    check.none_of(back, "groups that were admitted with fewer draws than the one before")
    check.none_of(
        prompts[again > put_back].tolist(), "prompts that were handed out again without a drop"
    )
    expected = sampler.indices_at(groups.drawn[fresh] - 1)
    check.none_of(
        groups.ids[fresh][groups.prompt[fresh] != expected].tolist(),
        f"groups whose prompt is not the next one of data.seed={records.config.data_seed}",
    )
    left_out = np.setdiff1d(sampler.indices_at(skipped - 1), _asked_less(records, store))
    check.none_of(
        left_out.tolist(), "prompts that were left out, and neither always nor never solved"
    )
    if records.config.retire_above is None:
        lost = _lost(groups, fresh, dropped, place, pending)
        check.none_of(prompts[lost].tolist(), "prompts that were put back and forgotten")
    return check


def _epochs(sampler: PromptSampler, total: int) -> str:
    """Say how often each source with an end was passed through after `total` draws."""
    passed = []
    for source, draws in zip(sampler.sources, sampler.draws_by_source(total)):
        if size := source.num_prompts:
            of = f" {source.name}" if source.name else ""
            passed.append(f"{draws // size:,} epochs of {size:,}{of} and {draws % size:,}")
    return f" ({'; '.join(passed)})" if passed else ""


def _orders(settings: Settings, store: RunReader) -> list[SourceOrder]:
    """Return how the prompts of each source were drawn."""
    sizes = store.totals()
    orders = []
    for name, own in (settings.data_sources or {"": {}}).items():
        seed = own.get("seed", settings.data_seed)
        shuffle = own.get("shuffle", settings.data_shuffle)
        order = SourceOrder(None, seed, shuffle, own.get("weight", 1), name)
        orders.append(replace(order, num_prompts=sizes.get(order.total_name)))
    return orders


def _asked_less(records: Records, store: RunReader) -> np.ndarray:
    """Return the prompts that may be left out, by the rewards of their groups.

    Two groups of a retired one were solved. No trajectory of a group of a resting one was.
    """
    limits = [start.retire_above for start in records.starts if start.retire_above is not None]
    rests = any(start.rest_unsolved for start in records.starts)
    if not limits and not rests:
        return np.empty(0, np.int64)
    rates: dict[int, list[float]] = {}
    for index, rate in store.solved_shares():
        rates.setdefault(index, []).append(rate)
    retired = [
        index
        for index, found in rates.items()
        if limits and len(found) > 1 and sum(sorted(found)[-2:]) / 2 > min(limits)
    ]
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
