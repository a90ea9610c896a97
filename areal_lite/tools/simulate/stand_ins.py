"""Stand-ins for what a controller gets from outside: the clock, prompts, tokenizer, rewards, store.

Virtual time is an asyncio event loop whose clock jumps to the next timer. Code that awaits timers,
futures and tasks runs on it unchanged, and an hour passes as fast as its events are computed. The
order of events depends on the program alone, so a run repeats exactly.

* Time stands still while anything is ready to run. Work therefore takes no virtual time.
* There are no sockets and no threads: their events would come at a real time.
* A loop with nothing ready and no timer would wait without end. It raises RuntimeError instead.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from areal_lite.data.prompts import Prompt
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.tools.simulate.workload import Lengths
from areal_lite.trajectory import FinishReason, Group, GroupState, Trajectory

T = TypeVar("T")
TOKEN = 1
"""Every simulated token has this id. It never ends a sequence."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time, which starts at 0 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        # The base class asks its selector how long to sleep, and for the events of sockets.
        self._selector = self

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Pass `timeout` seconds of virtual time. No socket has an event."""
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never happens")
        self._now += timeout
        return []

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        raise RuntimeError("no threads in virtual time: they would end at a real time")

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: `select` never returns an event."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread has to wake this loop."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


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


@dataclass(kw_only=True)
class SimulatedEpisodes:
    """Plays episodes whose lengths are drawn."""

    lengths: Lengths  # draws the lengths of a group, in tokens
    seed: int  # of the lengths and of the rewards
    group_size: int  # samples of a prompt
    grain: int  # tokens that a simulated token stands for
    uniform_share: float = 0.0  # share of the prompts whose answers all get the same reward
    reward_s: float = 0.0  # seconds until a completion has its reward
    # Lengths that were drawn for a group; its last sample removes them.
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, init=False)

    async def __call__(self, episode: Episode) -> Trajectory:
        """Play one episode."""
        length = self._length(episode)
        transcript = Transcript(episode)
        await transcript.sample(max_new_tokens=length)
        if length < episode.params.max_new_tokens:
            transcript.finish_reason = FinishReason.STOP
        if self.reward_s:
            await asyncio.sleep(self.reward_s)
        return transcript.trajectory(self._reward(episode))

    def _length(self, episode: Episode) -> int:
        """Return the length of this sample in simulated tokens, at least one."""
        group, sample = episode.group_id, episode.sample_index
        if group not in self._drawn:
            prompt = int(episode.prompt.prompt_id)
            self._drawn[group] = self.lengths.group(self.seed, prompt, self.group_size)
        drawn = self._drawn[group]
        if sample == self.group_size - 1:
            del self._drawn[group]
        tokens = round(int(drawn[sample]) / self.grain)
        return min(max(1, tokens), episode.params.max_new_tokens)

    def _reward(self, episode: Episode) -> float:
        """Return 1 for every sample of a uniform prompt, else 0 and 1 in turns."""
        key = f"{self.seed} {episode.prompt.prompt_id}".encode()
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") / 2**32
        return 1.0 if draw < self.uniform_share else float(episode.sample_index % 2)
