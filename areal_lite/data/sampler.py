"""Which prompt is next: endless, shuffled anew each epoch, and resumable from a few numbers.

Invariants: within an epoch every index is drawn exactly once; epoch e is the same permutation in every process that has the same
seed; a prompt put back is served before any new one; a retired prompt is never drawn again. The order is a pseudo-random permutation
that is evaluated point by point and not a shuffled list, so that an epoch of a million prompts costs no memory and its start does not stop
the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

_ROUNDS = 12  # with 6, the orders of five prompts are visibly not equally likely


class PromptSampler:
    """Indices of prompts; with `num_prompts=None` (an unbounded set) simply 0, 1, 2, ... Raises ValueError for an empty set."""

    def __init__(self, num_prompts: int | None, seed: int = 0, shuffle: bool = True) -> None:
        if num_prompts is not None and num_prompts < 1:
            raise ValueError(f"cannot sample from {num_prompts} prompts")
        self._order = {"num_prompts": num_prompts, "seed": seed, "shuffle": shuffle}
        self._drawn = 0
        self._put_back: deque[int] = deque()
        self.retired: set[int] = set()

    @property
    def exhausted(self) -> bool:
        """Every prompt has been retired: there is no next one."""
        return len(self.retired) == self._order["num_prompts"]

    @property
    def epoch(self) -> int:
        """Completed passes over the set; 0 for ever over an unbounded one."""
        num_prompts = self._order["num_prompts"]
        return 0 if num_prompts is None else self._drawn // num_prompts

    @property
    def drawn(self) -> int:
        """How many were drawn so far; more after each `next` that did not serve what was put back."""
        return self._drawn

    def next(self) -> int:
        """The next index: the one that was put back first, or else a new one. Not to be asked of an exhausted sampler."""
        assert not self.exhausted, "there is no prompt left"
        while self._put_back:
            if (index := self._put_back.popleft()) not in self.retired:
                return index
        while (index := self._draw()) in self.retired:
            pass
        return index

    def _draw(self) -> int:
        self._drawn += 1
        return self._at(self._drawn - 1)

    def _at(self, position: int) -> int:
        num_prompts = self._order["num_prompts"]
        if num_prompts is None:
            return position
        epoch, offset = divmod(position, num_prompts)
        return (
            permuted(offset, num_prompts, f"{self._order['seed']}/{epoch}")
            if self._order["shuffle"]
            else offset
        )

    def check_draws(self, draws: Iterable[tuple[int, int]]) -> None:
        """`draws`: what `drawn` was after which index. Raises ValueError if they are another sampler's: that one cannot be restored here."""
        for drawn, index in draws:
            if (here := self._at(drawn - 1)) != index:
                order = ", ".join(f"{key}={value}" for key, value in self._order.items())
                raise ValueError(
                    f"cannot resume: prompt {drawn} that was drawn was {index} and would be {here} with {order}; restore the data set"
                )

    def put_back(self, index: int) -> None:
        """Serve `index` once more, before anything new."""
        self._put_back.append(index)

    def retire(self, index: int) -> None:
        """Never draw `index` again."""
        self.retired.add(index)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON values."""
        return {
            **self._order,
            "drawn": self._drawn,
            "put_back": list(self._put_back),
            "retired": sorted(self.retired),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises ValueError if it was taken over other prompts or in another order."""
        for key, value in self._order.items():
            if state[key] != value:
                raise ValueError(
                    f"cannot resume: prompts were sampled with {key}={state[key]}, this run has {key}={value}"
                )
        self._drawn = state["drawn"]
        self._put_back = deque(state["put_back"])
        self.retired = set(state["retired"])


def permuted(position: int, size: int, key: str) -> int:
    """Where `position` goes in a pseudo-random permutation of 0..size-1 that `key` chooses.

    A balanced Feistel network over the least 4^k >= size, walked along its cycle until it is back inside (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002): a bijection whatever the round function is; 4 turns at most on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(_ROUNDS):
            digest = blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        position = left << half | right
        if position < size:
            return position
