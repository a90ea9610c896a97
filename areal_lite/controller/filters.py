"""Active sampling: which groups to train on, and which prompts to draw again.

A group whose trajectories all have the same reward has no advantage to learn from. A filter
removes it, and another prompt takes its place, so that batches stay full (Olmo 3,
arXiv 2512.13961).

A filter is a function f(group) that returns None to keep the group, or a short fixed name of the
reason to filter it. Filtered groups are counted by reason. Filters are named `module:function` in
`rollout.filters`, are called in order, and must be quick: they run on the controller's event loop.
"""

from collections.abc import Callable, Sequence

import numpy as np

from areal_lite.system.imports import load_object
from areal_lite.trajectory import Group

Filter = Callable[[Group], str | None]

# The last groups of a prompt decide whether it is retired. One group alone may have been luck.
_NUM_RATES = 2


def zero_variance(group: Group) -> str | None:
    """Filter a group whose rewards are all equal. `rollout.active_sampling` puts this first."""
    return "zero_variance" if len({t.reward for t in group.trajectories}) == 1 else None


def load_filters(names: Sequence[str], active_sampling: bool) -> list[Filter]:
    """Import the filters. Raises ValueError that says which one cannot be used and why."""
    filters: list[Filter] = [zero_variance] if active_sampling else []
    return filters + [load_object("rollout.filters", name) for name in names]


def first_reason(filters: Sequence[Filter], group: Group) -> str | None:
    """Return the first reason to filter `group`, or None to keep it."""
    return next((reason for f in filters if (reason := f(group)) is not None), None)


class SolveRates:
    """The solve rates of each prompt: the share of positive rewards in each of its last groups."""

    def __init__(self, retire_above: float | None):
        """Retire prompts above the mean rate `retire_above`; none if it is None."""
        self._retire_above = retire_above
        self._rates: dict[int, tuple[float, ...]] = {}

    def record(self, prompt_index: int, rewards: Sequence[float]) -> bool:
        """Record the rewards of a group, and tell whether its prompt is now to be retired."""
        if self._retire_above is None:
            return False
        rate = float(np.mean([reward > 0 for reward in rewards]))
        rates = (*self._rates.get(prompt_index, ()), rate)[-_NUM_RATES:]
        self._rates[prompt_index] = rates
        return len(rates) == _NUM_RATES and sum(rates) / len(rates) > self._retire_above
