"""The order of prompts of one or more sources: endless, and resumable from a few numbers.

* Sources take turns by their weights: after n draws, a source with the share s of all weights has
  had n s of them, less than one more or less.
* An epoch is one pass over a source, in a new random order. It draws every prompt exactly once.
* Draw n depends on n and on the sources (sizes, seeds, weights and their order) only. An epoch's
  order is computed shortly before its first draw: 10 ms and 8 MB for a million prompts.
* Prompt i of source k of K has the index K i + k.
* An index that was put back is served before any new one.
* A retired index is never drawn again. One that rests is left out of some epochs of its source. The
  turn of either goes to the draw after it, of whatever source.

The turns are a Pfair schedule on one processor. Source k has the weight w_k, a positive integer,
and W is the sum of all weights. Its j-th turn (j = 1, 2, …) may have the numbers n > (j - 1) W /
w_k up to the deadline ceil(j W / w_k); exactly then, the share above holds. Such a schedule exists
(Baruah et al., Algorithmica 15, 1996). `interleave` finds it: it gives each n to the open turn with
the earliest deadline, which is optimal for turns of unit length. After W turns each source k has
had w_k, and the turns repeat.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class SourceOrder:
    """The order of the prompts of one source; `num_prompts` is None for an endless one."""

    num_prompts: int | None
    seed: int = 0
    weight: int = 1
    name: str = ""

    @property
    def total_name(self) -> str:
        """Return the name of `num_prompts` among the totals of a store."""
        return f"prompts/{self.name}" if self.name else "prompts"


class PromptSampler:
    """Draws indices of prompts.

    `drawn` is the number of new indices so far. `returned` has indices that were put back, which
    do not count again and are served even if they rest. `retired` has the retired ones. Raises
    ValueError for an empty source.
    """

    def __init__(self, *sources: SourceOrder) -> None:
        for source in sources:
            if source.num_prompts is not None and source.num_prompts < 1:
                raise ValueError(f"cannot sample from {source.num_prompts} prompts")
        self.sources = sources
        weights = np.array([source.weight for source in sources], np.int64)
        self._weights = weights // np.gcd.reduce(weights)
        self._turns = interleave(self._weights.tolist())
        # The turns that the same source had before, in this round of turns.
        self._turns_before = np.zeros_like(self._turns)
        for number, weight in enumerate(self._weights):
            self._turns_before[self._turns == number] = np.arange(weight)
        self._epoch_order = lru_cache(maxsize=2 * len(sources))(_epoch_order)
        self.drawn = 0
        self.returned: deque[int] = deque()
        self.retired: set[int] = set()
        # The first epoch of its source that has an index again.
        self._rests_until: dict[int, int] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each source that has an end, by its name among a store's totals."""
        sized = {source.total_name: source.num_prompts for source in self.sources}
        return {name: size for name, size in sized.items() if size is not None}

    @property
    def exhausted(self) -> bool:
        """Return whether every prompt has been retired."""
        sizes = [source.num_prompts for source in self.sources]
        return None not in sizes and len(self.retired) == sum(filter(None, sizes))

    @property
    def epochs(self) -> dict[str, float]:
        """Return how often each source that has an end was passed through, by name."""
        return {
            source.name: draws / source.num_prompts
            for source, draws in zip(self.sources, self.draws_by_source(self.drawn))
            if source.num_prompts is not None
        }

    def draws_by_source(self, drawn: int) -> list[int]:
        """Return how many of the first `drawn` draws each source had."""
        rounds, rest = divmod(drawn, len(self._turns))
        started = np.bincount(self._turns[:rest], minlength=len(self.sources))
        return (rounds * self._weights + started).tolist()

    def next(self) -> int:
        """Return the index that was put back first, or else a new one."""
        assert not self.exhausted, "every prompt has been retired"
        while self.returned:
            if (index := self.returned.popleft()) not in self.retired:
                return index
        while True:
            index = self.index_at(self.drawn)
            self.drawn += 1
            if index not in self.retired and not self._rests(index):
                return index

    def put_back(self, index: int) -> None:
        """Serve `index` again, before any new index."""
        self.returned.append(index)

    def retire(self, index: int) -> None:
        """Exclude `index` from all later draws."""
        self.retired.add(index)

    def rest(self, index: int, epochs: int, *, after: int) -> None:
        """Leave `index` out of the `epochs` that follow the one in which draw `after` was made.

        `after` counts from 1. An index of a source without end never comes again.
        """
        if self.sources[index % len(self.sources)].num_prompts is not None:
            self._rests_until[index] = self._epoch(index, self.draws_by_source(after)) + 1 + epochs

    @property
    def num_resting(self) -> int:
        """Return how many indices the present epochs of their sources leave out."""
        draws = self.draws_by_source(self.drawn)  # once: every prompt may be resting
        return sum(self._epoch(index, draws) < end for index, end in self._rests_until.items())

    def resume(self, drawn: int, put_back: Iterable[int]) -> None:
        """Continue after `drawn` new indices, and serve first what was put back."""
        self.drawn = drawn
        self.returned = deque(put_back)

    def check_draws(self, draws: Iterable[tuple[int, int]]) -> None:
        """Raise ValueError unless this sampler makes `draws`: pairs of `drawn` after it, index."""
        for drawn, index in draws:
            if (here := self.index_at(drawn - 1)) != index:
                raise ValueError(
                    f"cannot resume: prompt {drawn} that was drawn was {index} and would be {here}"
                    f" with {_described(self.sources)}; restore the data set"
                )

    def index_at(self, position: int) -> int:
        """Return the index of a draw; `position` counts from 0 over all epochs."""
        rounds, turn = divmod(position, len(self._turns))
        number = int(self._turns[turn])
        place = int(rounds * self._weights[number] + self._turns_before[turn])
        source = self.sources[number]
        if source.num_prompts is not None:
            epoch, offset = divmod(place, source.num_prompts)
            order = self._epoch_order(source.num_prompts, source.seed, epoch, number)
            place = int(order[offset])
        return len(self.sources) * place + number

    def _rests(self, index: int) -> bool:
        """Return whether the epoch of the last draw of its source leaves `index` out."""
        until = self._rests_until.get(index)
        return until is not None and self._epoch(index, self.draws_by_source(self.drawn)) < until

    def _epoch(self, index: int, draws: list[int]) -> int:
        """Return the epoch of the source of `index` after `draws` from each source."""
        number = index % len(self.sources)
        num_prompts = self.sources[number].num_prompts
        assert num_prompts is not None
        return (draws[number] - 1) // num_prompts


def _described(sources: Sequence[SourceOrder]) -> str:
    """Write the settings that decide the order, as far as they are set."""
    return "; ".join(
        ", ".join(f"{key}={value}" for key, value in asdict(source).items() if value != "")
        for source in sources
    )


def _epoch_order(num_prompts: int, seed: int, epoch: int, number: int) -> np.ndarray:
    """Return a uniformly random permutation of 0..num_prompts-1, int64 [num_prompts]."""
    # RandomState, not Generator: its stream is the same in every version of NumPy, so a run can be
    # resumed with another version. The source's number keeps sources of one size independent.
    bits = np.random.MT19937(np.random.SeedSequence((seed % 2**64, epoch, number)))
    return np.random.RandomState(bits).permutation(num_prompts)


def interleave(weights: Sequence[int]) -> np.ndarray:
    """Return the source of each of the first sum(weights) turns, int64. Then they repeat.

    Among equal deadlines the first source has its turn first.
    """
    total = sum(weights)
    taken = [0] * len(weights)
    turns = np.empty(total, np.int64)
    for number in range(1, total + 1):
        is_open = (k for k, weight in enumerate(weights) if taken[k] * total < number * weight)
        # The deadline is the ceiling of this quotient.
        chosen = min(is_open, key=lambda k: -(-(taken[k] + 1) * total // weights[k]))
        taken[chosen] += 1
        turns[number - 1] = chosen
    return turns
