"""Which prompts are asked less often, and which groups are trained on.

The curriculum looks at the rewards of a prompt's groups. A trajectory with a positive reward solves
its prompt.

* A prompt that is nearly always solved is retired: it is not asked again (`retire_above`).
* A prompt that no trajectory of its group solved rests (`rest_unsolved`). Each such group in a row
  doubles the rest: 1 epoch, 2, 4, … So a hard prompt costs little, and is still tried again after
  the policy has learned more.

Both read the groups of the store only. A resumed run therefore goes on with the same prompts.

A filter removes a group that teaches nothing, and another prompt takes its place, so that batches
stay full (active sampling; Olmo 3, arXiv 2512.13961). A filter is a function f(group) that returns
None to keep the group, or a short fixed name of the reason to filter it. Filtered groups are
counted by reason. Filters are named `module:function` in `rollout.filters`, are called in order,
and must be quick: they run on the controller's event loop.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from areal_lite.data.sampler import PromptSampler
from areal_lite.system.imports import load_object
from areal_lite.trajectory import Group

# The last groups of a prompt decide whether it is retired. One group alone may have been luck.
_NUM_RATES = 2


class Curriculum:
    """Retires and rests the prompts of `sampler`.

    `retire_above` is the solve rate above which a prompt is retired; none is if that is None.
    `rest_unsolved` is the longest rest in epochs; no prompt rests if that is 0.
    """

    def __init__(self, sampler: PromptSampler, retire_above: float | None, rest_unsolved: int):
        self._sampler = sampler
        self._retire_above = retire_above
        self._rest_unsolved = rest_unsolved
        self._rates: dict[int, tuple[float, ...]] = {}
        self._unsolved: defaultdict[int, int] = defaultdict(int)

    @property
    def active(self) -> bool:
        """Return whether rewards change what is asked."""
        return self._retire_above is not None or self._rest_unsolved > 0

    def record(self, prompt_index: int, rewards: Sequence[float], drawn: int) -> None:
        """Record the rewards of a group. `drawn` counts the draws when it was admitted."""
        rate = sum(reward > 0 for reward in rewards) / len(rewards)
        if self._retire_above is not None:
            rates = (*self._rates.get(prompt_index, ()), rate)[-_NUM_RATES:]
            self._rates[prompt_index] = rates
            if len(rates) == _NUM_RATES and sum(rates) / len(rates) > self._retire_above:
                self._sampler.retire(prompt_index)
        if self._rest_unsolved:
            self._rest(prompt_index, rate, drawn)

    def _rest(self, prompt_index: int, rate: float, drawn: int) -> None:
        if rate > 0:
            self._unsolved.pop(prompt_index, None)
            return
        # The bound keeps the power small, however often a prompt was tried.
        epochs = min(2 ** min(self._unsolved[prompt_index], 30), self._rest_unsolved)
        self._unsolved[prompt_index] += 1
        self._sampler.rest(prompt_index, epochs, after=drawn)


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
