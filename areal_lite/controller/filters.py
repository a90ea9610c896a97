"""Active sampling: which finished groups are worth training on, and which prompts are worth asking again (Olmo 3, arXiv 2512.13961).

A group whose members all got the same reward has no advantage to learn from; a filter takes it out, and another prompt takes its place, so
that batches stay full. A filter is f(group) -> None to keep it, or why not: a short fixed name, for it is counted by it. Filters are named
`module:function` in `rollout.filters`, are asked in order, and run on the controller's event loop: they must be quick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from areal_lite.system.imports import load_object
from areal_lite.trajectory import Group

Filter = Callable[[Group], str | None]
_GROUPS_SEEN = 2  # a prompt is retired by its last groups; one alone may have been luck


def zero_variance(group: Group) -> str | None:
    """`rollout.active_sampling` puts this one first."""
    return "zero_variance" if len({t.reward for t in group.trajectories}) == 1 else None


def load_filters(names: Sequence[str], active_sampling: bool) -> list[Filter]:
    """The functions behind `names`. Raises ValueError that says which one cannot be used and why."""
    return [zero_variance] * active_sampling + [
        load_object("rollout.filters", name) for name in names
    ]


def first_reason(filters: Sequence[Filter], group: Group) -> str | None:
    """Why `group` is not to be trained on; None if it is."""
    return next((reason for ask in filters if (reason := ask(group)) is not None), None)


class SolveRates:
    """Per prompt, the share of trajectories with a positive reward in each of its last groups."""

    def __init__(self, retire_above: float | None):
        self._retire_above = retire_above
        self._rates: dict[int, deque[float]] = {}

    def retires(self, prompt_index: int, group: Group) -> bool:
        """Note `group`; has its prompt become too easy to be asked again?"""
        return self.note(prompt_index, [t.reward for t in group.trajectories])

    def note(self, prompt_index: int, rewards: Sequence[float]) -> bool:
        """`retires`, of a group that had `rewards`."""
        if self._retire_above is None:
            return False
        rates = self._rates.setdefault(prompt_index, deque(maxlen=_GROUPS_SEEN))
        rates.append(float(np.mean([reward > 0 for reward in rewards])))
        return len(rates) == _GROUPS_SEEN and sum(rates) / len(rates) > self._retire_above
