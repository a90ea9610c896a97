"""Stand-ins for what a controller gets from outside: clock, servers, prompts, rewards, store.

Virtual time is an asyncio event loop whose clock jumps to the next timer. Code that awaits timers,
futures and tasks runs on it unchanged, and an hour passes as fast as its events are computed. The
order of events depends on the program alone, so a run repeats exactly.

* Time stands still while anything is ready to run. Work therefore takes no virtual time.
* There are no sockets and no threads: their events would come at a real time.
* A loop with nothing ready and no timer would wait without end. It raises RuntimeError instead.

The modelled servers have the interface of the HTTP client. The fleet is the real one: it chooses
servers, counts requests, and moves the requests of a server that is lost.

    Fleet -> SimulatedServers.generate -> DecodingServer (decoding.py)
                     ^ one timer for each server: its next event
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from areal_lite.data.prompts import Prompt
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.run_dir.store import Store
from areal_lite.servers.client import GenerationChunk, SamplingParams, ServerUnreachable
from areal_lite.servers.registry import ServerInfo
from areal_lite.trajectory import FinishReason, Group, GroupState, Trajectory
from benchmarks.simulate.decoding import DecodingServer, Generation, ServerSpeed, Usage
from benchmarks.simulate.workload import Workload

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


class Ledger(Store):
    """A store of the states of groups alone, which stands in for its StoreThread, too."""

    def submit(
        self, method: Callable[..., Any], *args: Any, durable: bool = False
    ) -> asyncio.Future[Any]:
        """Run the method of Store at once, and return the future of its result."""
        future = asyncio.get_running_loop().create_future()
        future.set_result(getattr(self, method.__name__)(*args))
        return future

    def finish(
        self,
        group: Group,
        texts: object,
        reason: str | None,
        now: float,
        state: str = GroupState.FINISHED,
    ) -> None:
        """Finish the group without its trajectories, which nobody reads."""
        super().finish(replace(group, trajectories=[]), (), reason, now, state)


@dataclass
class SimulatedEpisodes:
    """Plays episodes whose lengths are drawn."""

    work: Workload
    seed: int  # of the lengths and of the rewards
    group_size: int  # samples of a prompt
    # Lengths that were drawn for a group; its last sample removes them.
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, init=False)

    async def __call__(self, episode: Episode) -> Trajectory:
        """Play one episode."""
        length = self._length(episode)
        transcript = Transcript(episode)
        await transcript.sample(max_new_tokens=length)
        if length < episode.params.max_new_tokens:
            transcript.finish_reason = FinishReason.STOP
        if self.work.reward_s:
            await asyncio.sleep(self.work.reward_s)
        return transcript.trajectory(self._reward(episode))

    def _length(self, episode: Episode) -> int:
        """Return the length of this sample in simulated tokens, at least one."""
        group, sample = episode.group_id, episode.sample_index
        if group not in self._drawn:
            prompt = int(episode.prompt.prompt_id)
            self._drawn[group] = self.work.lengths.group(self.seed, prompt, self.group_size)
        drawn = self._drawn[group]
        if sample == self.group_size - 1:
            del self._drawn[group]
        tokens = round(int(drawn[sample]) / self.work.grain)
        return min(max(1, tokens), episode.params.max_new_tokens)

    def _reward(self, episode: Episode) -> float:
        """Return 1 for every sample of a uniform prompt, else 0 and 1 in turns."""
        key = f"{self.seed} {episode.prompt.prompt_id}".encode()
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") / 2**32
        return 1.0 if draw < self.work.uniform_share else float(episode.sample_index % 2)


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The conversion of simulated tokens to tokens of a server."""

    grain: int  # tokens that a simulated token stands for
    prompt_tokens: int  # length of a prompt
    # requests that share the computation of a prompt: a group's, with a prefix cache
    sharing: int = 1

    def generation(self, num_ids: int, max_new_tokens: int, begun: int, version: int) -> Generation:
        """Return the request of `num_ids` simulated tokens.

        An earlier request has generated `begun` tokens of the first one, less than `grain`.
        """
        context = num_ids * self.grain
        prompt = min(context, self.prompt_tokens)
        prefill = context - prompt + prompt / self.sharing
        return Generation(
            context=context,
            target=max_new_tokens * self.grain,
            prefill=prefill + begun,
            done=begun,
            spans=[(version, begun)] if begun else [],
        )

    def chunk(self, request: Generation) -> GenerationChunk:
        """Return the answer to a request that left its server: whole simulated tokens."""
        ends = [end // self.grain for end in accumulate(count for _, count in request.spans)]
        versions = np.empty(ends[-1] if ends else 0, np.int32)
        for start, end, (version, _) in zip([0, *ends], ends, request.spans):
            versions[start:end] = version
        return GenerationChunk(
            tokens=np.full(len(versions), TOKEN, np.int32),
            logprobs=np.zeros(len(versions), np.float32),
            versions=versions,
            finish_reason="length" if request.done == request.target else "abort",
        )


@dataclass(eq=False, slots=True)
class _Slot:
    """A server that is up: its model, the futures of its requests, and its timer."""

    info: ServerInfo
    model: DecodingServer
    answers: dict[Generation, asyncio.Future[None]] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class SimulatedServers:
    """All servers of a run, with the calls of SGLangClient. Create it inside the event loop."""

    def __init__(self, count: int, tensor_parallel: int, speed: ServerSpeed, requests: Requests):
        self._loop = asyncio.get_running_loop()
        self._speed = speed
        self._requests = requests
        digits = len(str(count - 1))
        infos = [
            ServerInfo(
                name=f"s{number:0{digits}}",
                url=f"http://s{number}.simulated",
                api_key=None,
                tensor_parallel=tensor_parallel,
                pid=1,
            )
            for number in range(count)
        ]
        self._slots = {info: _Slot(info, DecodingServer(speed)) for info in infos}
        # Tokens of a simulated token that an aborted request left unfinished, by completion.
        self._begun: dict[str, int] = {}
        self._past = Usage()

    def announced(self) -> list[ServerInfo]:
        """Return the servers that are up."""
        return list(self._slots)

    async def generate(
        self,
        server: ServerInfo,
        input_ids: np.ndarray,
        params: SamplingParams,
        rid: str,
        cache_key: str,
    ) -> GenerationChunk:
        """Generate exactly `params.max_new_tokens`, unless a push ends the request."""
        slot = self._slot(server)
        completion = rid.rpartition("-")[0]
        begun = self._begun.pop(completion, 0)
        self._advance(slot)
        request = self._requests.generation(
            len(input_ids), params.max_new_tokens, begun, slot.model.version
        )
        slot.model.add(request)
        answer = slot.answers[request] = self._loop.create_future()
        self._settle(slot)
        try:
            await answer
        except asyncio.CancelledError:
            if slot.answers.pop(request, None) and self._slots.get(server) is slot:
                self._advance(slot)
                slot.model.remove(request)
                self._settle(slot)
            raise
        if rest := request.done % self._requests.grain:
            self._begun[completion] = rest
        return self._requests.chunk(request)

    async def weight_version(self, server: ServerInfo) -> int:
        return self._slot(server).model.version

    async def check_health(self, server: ServerInfo) -> None:
        self._slot(server)

    async def reset(self, server: ServerInfo) -> None:
        await self.abort_all(server)

    async def abort_all(self, server: ServerInfo) -> None:
        slot = self._slot(server)
        for answer in list(slot.answers.values()):
            answer.cancel()

    async def close(self) -> None:
        """Stop all timers."""
        for slot in self._slots.values():
            if slot.timer:
                slot.timer.cancel()

    def pause(self, servers: Iterable[ServerInfo], mode: str) -> None:
        """Pause for a push; `mode` says what happens to running requests."""
        for slot in self._up(servers):
            self._advance(slot)
            for request in slot.model.pause(mode):
                self._answer(slot, request)
            self._settle(slot)

    def resume(self, servers: Iterable[ServerInfo], version: int) -> list[str]:
        """Continue with the weights of `version`; return the names of servers that are gone."""
        servers = list(servers)
        for slot in self._up(servers):
            self._advance(slot)
            slot.model.resume(version)
            self._settle(slot)
        return [server.name for server in servers if server not in self._slots]

    def lose(self, count: int) -> list[ServerInfo]:
        """End the first `count` servers with all that runs on them, and return them."""
        gone = self.announced()[:count]
        for slot in self._up(gone):
            self._advance(slot)
        for info in gone:
            slot = self._slots.pop(info)
            self._past += slot.model.usage
            if slot.timer:
                slot.timer.cancel()
            for answer in slot.answers.values():
                if not answer.done():
                    answer.set_exception(ServerUnreachable(info, "lost"))
        return gone

    def bring_back(self, servers: Iterable[ServerInfo]) -> None:
        """Start the servers again, as new processes with the weights of version 0."""
        for info in (replace(server, pid=server.pid + 1) for server in servers):
            self._slots[info] = _Slot(info, DecodingServer(self._speed, now=self._loop.time()))

    def usage(self) -> Usage:
        """Return what all servers have done until now, lost ones included."""
        for slot in self._slots.values():
            self._advance(slot)
        return sum((slot.model.usage for slot in self._slots.values()), self._past)

    def _up(self, servers: Iterable[ServerInfo]) -> list[_Slot]:
        return [self._slots[info] for info in servers if info in self._slots]

    def _slot(self, server: ServerInfo) -> _Slot:
        if server not in self._slots:
            raise ServerUnreachable(server, "lost")
        return self._slots[server]

    def _advance(self, slot: _Slot) -> None:
        for request in slot.model.advance(self._loop.time()):
            self._answer(slot, request)

    def _answer(self, slot: _Slot, request: Generation) -> None:
        answer = slot.answers.pop(request, None)
        if answer and not answer.done():
            answer.set_result(None)

    def _settle(self, slot: _Slot) -> None:
        """Pass the time until now on a server, and set the timer of its next event."""
        self._advance(slot)
        if slot.timer:
            slot.timer.cancel()
        event = slot.model.next_event() if self._slots.get(slot.info) is slot else None
        slot.timer = None if event is None else self._loop.call_at(event, self._settle, slot)
