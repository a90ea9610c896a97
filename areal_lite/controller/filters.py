"""Active sampling: which groups to train on, and which prompts to draw again.

A group whose trajectories all have the same reward has no advantage to learn from. A filter
removes it, and another prompt takes its place, so that batches stay full (Olmo 3,
arXiv 2512.13961).

A filter is a function f(group) that returns None to keep the group, or a short fixed name of the
reason to filter it. Filtered groups are counted by reason. Filters are named `module:function` in
`rollout.filters`, are called in order, and must be quick: they run on the controller's event loop.
"""

from collections.abc import Callable, Sequence

from areal_lite.system.imports import load_object
from areal_lite.trajectory import Group

Filter = Callable[[Group], str | None]


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
