"""The order of prompts: endless, shuffled anew each epoch, resumable from a few numbers.

Invariants:
  * every index is drawn exactly once per epoch;
  * the order of epoch e depends on (number of prompts, seed, e) only;
  * an index that was put back is served before any new one;
  * a retired index is never drawn again.

An epoch's order is computed when its first index is drawn: 10 ms and 8 MB for a million prompts.
"""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np


class PromptSampler:
    """Draws indices of prompts; counts through an unbounded set (`num_prompts=None`): 0, 1, 2, …

    `drawn` is the number of new indices so far; those that were put back do not count again.
    Raises ValueError for an empty set.
    """

    def __init__(self, num_prompts: int | None, seed: int = 0, shuffle: bool = True) -> None:
        if num_prompts is not None and num_prompts < 1:
            raise ValueError(f"cannot sample from {num_prompts} prompts")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self.drawn = 0
        self._put_back: deque[int] = deque()
        self.retired: set[int] = set()

    @property
    def exhausted(self) -> bool:
        """Return whether every prompt has been retired."""
        return len(self.retired) == self._num_prompts

    @property
    def epoch(self) -> int:
        """Return the number of completed passes; 0 for an unbounded set."""
        return 0 if self._num_prompts is None else self.drawn // self._num_prompts

    def next(self) -> int:
        """Return the index that was put back first, or else a new one."""
        assert not self.exhausted, "every prompt has been retired"
        while self._put_back:
            if (index := self._put_back.popleft()) not in self.retired:
                return index
        while True:
            index = self._index_at(self.drawn)
            self.drawn += 1
            if index not in self.retired:
                return index

    def put_back(self, index: int) -> None:
        """Serve `index` again, before any new index."""
        self._put_back.append(index)

    def retire(self, index: int) -> None:
        """Exclude `index` from all later draws."""
        self.retired.add(index)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON values."""
        return {
            **self._settings(),
            "drawn": self.drawn,
            "put_back": list(self._put_back),
            "retired": sorted(self.retired),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises ValueError if that is of other prompts or another order."""
        for key, value in self._settings().items():
            if state[key] != value:
                raise ValueError(
                    f"cannot resume: prompts were sampled with {key}={state[key]},"
                    f" this run has {key}={value}"
                )
        self.drawn = state["drawn"]
        self._put_back = deque(state["put_back"])
        self.retired = set(state["retired"])

    def check_draws(self, draws: Iterable[tuple[int, int]]) -> None:
        """Raise ValueError unless this sampler makes `draws`: pairs of `drawn` after it, index."""
        for drawn, index in draws:
            if (here := self._index_at(drawn - 1)) != index:
                settings = ", ".join(f"{key}={value}" for key, value in self._settings().items())
                raise ValueError(
                    f"cannot resume: prompt {drawn} that was drawn was {index} and would be {here}"
                    f" with {settings}; restore the data set"
                )

    def indices_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the indices of draws, int64; `positions` count from 0 over all epochs, int64."""
        if self._num_prompts is None:
            return positions
        epochs, offsets = np.divmod(positions, self._num_prompts)
        if not self._shuffle:
            return offsets
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = _epoch_order(self._num_prompts, self._seed, int(epoch))[offsets[here]]
        return found

    def _settings(self) -> dict[str, Any]:
        return {"num_prompts": self._num_prompts, "seed": self._seed, "shuffle": self._shuffle}

    def _index_at(self, position: int) -> int:
        """Return the index of the draw at `position`, counted from 0 over all epochs."""
        if self._num_prompts is None:
            return position
        epoch, offset = divmod(position, self._num_prompts)
        if not self._shuffle:
            return offset
        return int(_epoch_order(self._num_prompts, self._seed, epoch)[offset])


@lru_cache(maxsize=2)
def _epoch_order(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    """Return a uniformly random permutation of 0..num_prompts-1, int64 [num_prompts]."""
    # RandomState, not Generator: its stream is the same in every version of NumPy, so a run can be
    # resumed with another version.
    bits = np.random.MT19937(np.random.SeedSequence((seed % 2**64, epoch)))
    return np.random.RandomState(bits).permutation(num_prompts)
