"""Stand-ins for what a controller gets from outside: prompts, tokenizer, rewards and the store."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from areal_lite.data.prompts import Prompt
from areal_lite.trajectory import Group, GroupState

TOKEN = 1
"""Every simulated token has this id. It never ends a sequence."""


class Prompts:
    """Prompts without end, each `tokens` simulated tokens long and never asked twice by itself."""

    num_prompts: int | None = None
    num_too_long: int = 0

    def __init__(self, tokens: int):
        self._tokens = [TOKEN] * tokens

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=str(index), tokens=self._tokens, answer="", text="")


class NoTokenizer:
    """Encodes nothing. A simulated completion has no text."""

    eos_ids = (0,)
    vocab_size = 2

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


class NoRewards:
    """Never asked: the workflow gives each trajectory its reward."""

    async def score(self, completion: str, answer: str) -> float:
        raise AssertionError("a simulated trajectory has its reward")


class NoLag:
    """The lag of an event loop in virtual time: none."""

    async def watch(self) -> None:
        """Return at once."""

    def take_p99(self) -> float:
        return 0.0


class Ledger:
    """The states of all groups, in memory, with the interface of StoreThread.

    It refuses the transitions that Store refuses, and commits in no time.
    """

    def __init__(self) -> None:
        self.states: dict[int, GroupState] = {}
        self.steps: dict[int, int] = {}

    def submit(
        self, method: Callable[..., Any], *args: Any, durable: bool = False
    ) -> asyncio.Future[Any]:
        """Run the method of Store of this name, and return the future of its result."""
        future = asyncio.get_running_loop().create_future()
        future.set_result(getattr(self, method.__name__)(*args))
        return future

    def admit(self, group_id: int, *_: Any) -> None:
        if group_id in self.states:
            raise RuntimeError(f"group {group_id} was admitted twice")
        self.states[group_id] = GroupState.IN_FLIGHT

    def finish(
        self, group: Group, texts: object, reason: object, now: float, state: GroupState
    ) -> None:
        self._move(group.group_id, (GroupState.IN_FLIGHT,), state)

    def assign(self, group_ids: object, step: object) -> None:
        """Record nothing: a simulated controller is never replaced."""

    def use(self, group_ids: Sequence[int], step: int, draws: object) -> None:
        for group_id in group_ids:
            self._move(group_id, (GroupState.FINISHED,), GroupState.USED)
            self.steps[group_id] = step

    def drop(self, group_id: int, reason: str, now: float) -> None:
        before = (GroupState.IN_FLIGHT, GroupState.FINISHED)
        self._move(group_id, before, GroupState.DROPPED)

    def set_totals(self, totals: object) -> None:
        """Discard the totals: a simulated run is never resumed."""

    def size(self, group_ids: object) -> dict[str, float]:
        """Return no sizes, because a simulation has no file."""
        return {}

    def counts(self) -> dict[str, int]:
        found = Counter(self.states.values())
        return {state.value: found[state] for state in GroupState}

    def _move(self, group_id: int, before: tuple[GroupState, ...], state: GroupState) -> None:
        if self.states.get(group_id) not in before:
            now = self.states.get(group_id, "unknown")
            raise RuntimeError(f"group {group_id} was to become {state}, but is {now}")
        self.states[group_id] = state
