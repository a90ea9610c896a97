"""A process that plays episodes: `python -m areal_lite.rollout.worker` (workers/process.py).

It runs the user's code: workflows with their tools and agents, filters, and data. Many episodes
share its event loop, and the code of each may take `rollout.episode_timeout_s`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

import msgspec
import numpy as np
import uvloop

from areal_lite.config.data import Sampled
from areal_lite.data.prompts import Prompt, Split, load_prompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.extensions import load_object
from areal_lite.rollout.episode import Episode, is_grouped, load_workflow, play, started
from areal_lite.servers.client import SamplingParams
from areal_lite.servers.fleet import Completion
from areal_lite.system.processes import steady_time
from areal_lite.trajectory import Group
from areal_lite.workers import process
from areal_lite.workers.marks import REQUEST, marks, waiting_at

Sampler = Callable[[np.ndarray, SamplingParams], Awaitable[Completion]]

_BEAT_S = 1.0
_GRACE_S = 2.0  # how long a cancelled task may take to end by itself


class Play(msgspec.Struct, tag=True):
    """Play the episodes `samples` of a group."""

    group_id: int
    samples: list[int]
    prompt: Prompt
    params: SamplingParams

    def episodes(
        self, samplers: Sequence[Sampler], tokenizer: Tokenizer, clock: Callable[[], float]
    ) -> list[Episode]:
        """Return the input of a workflow. `samplers` complete the tokens of each episode."""
        return [
            Episode(
                prompt=self.prompt,
                sample_index=sample,
                group_id=self.group_id,
                tokenizer=tokenizer,
                params=self.params,
                clock=clock,
                complete=complete,
            )
            for sample, complete in zip(self.samples, samplers)
        ]


class FetchPrompt(msgspec.Struct, tag=True):
    """Return a prompt of the user's own data."""

    split: Split
    index: int


class Judge(msgspec.Struct, tag=True):
    """Ask a filter for its reason to leave out a group."""

    filter: str
    group: Group


class Complete(msgspec.Struct):
    """Ask for a completion of `tokens` (int32 [n]) in the episode at a place in `Play.samples`."""

    place: int
    tokens: np.ndarray
    params: SamplingParams


def own_filters(config: Sampled) -> list[str]:
    """Return the filters that are code of the user."""
    return [name for name in config.rollout.filters if ":" in name]


class EpisodeWorker:
    """Answers the requests of a pool, all at the same time.

    It serves the workflow, the filters and `splits` of the prompts of a source. The pool kills it
    when it is silent for `silence_s`.
    """

    def __init__(self, config: Sampled, splits: Sequence[Split], silence_s: float):
        self._config, self._splits, self._silence_s = config, splits, silence_s
        self._tokenizer = Tokenizer(config.model, config.data.chat_template_kwargs)
        module, _, _ = config.rollout.workflow.partition(":")
        if module.startswith("areal_lite."):  # no code of the user in the process that forks
            getattr(import_module(module), "preload", lambda: None)()

    def load(self) -> "EpisodeWorker":
        """Load the user's code. Raises ValueError if something cannot be used."""
        config = self._config
        self._workflow = load_workflow(config.rollout)
        self._filters = {n: load_object("rollout.filters", n) for n in own_filters(config)}
        self._prompts = {
            split: load_prompts(config.data, config.model, split, config.reward.function)
            for split in self._splits
        }
        self._closed = asyncio.Event()
        self._calls = count()
        self._answers: dict[int, asyncio.Future[process.Answer]] = {}
        self._asking: Counter[int] = Counter()  # completions that each request waits for
        # The supervisors and the tasks of the requests, the oldest first.
        self._running: dict[int, tuple[asyncio.Task[None], asyncio.Task[Any]]] = {}
        return self

    async def serve(self, pipes: process.Pipes) -> None:
        """Answer requests until the pool closes its pipe."""
        self._pipes = pipes
        loop = asyncio.get_running_loop()
        marks.install(loop, pipes.file)
        try:
            async with started(self._workflow, self._config):
                sizes = {s: (p.num_prompts, p.num_too_long) for s, p in self._prompts.items()}
                grouped = is_grouped(self._workflow)
                self._pipes.send(process.Ready(facts={"grouped": grouped, "prompts": sizes}))
                loop.add_reader(self._pipes.frames, self._receive)
                while not self._closed.is_set():
                    marks.watch(0.9 * self._silence_s)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._closed.wait(), _BEAT_S)
                    running = ((n, waiting_at(work)) for n, (_, work) in self._running.items())
                    oldest, where = next(running, (0, ""))
                    self._pipes.send(process.Beat(oldest=oldest, where=where))
        except Exception as error:
            failure = process.short_text("{}: {}", type(error).__name__, error)
            self._pipes.send(process.Ready(error=failure))

    def _receive(self) -> None:
        if (messages := self._pipes.receive()) is None:
            asyncio.get_running_loop().remove_reader(self._pipes.frames)
            self._closed.set()
        for message in messages or ():
            if isinstance(message, process.Request):
                context = copy_context()
                context.run(REQUEST.set, message.number)
                work = asyncio.create_task(self._result(message), context=context)
                supervisor = asyncio.create_task(self._supervise(message, work))
                self._running[message.number] = supervisor, work
            elif isinstance(message, process.Answer):
                if (answer := self._answers.get(message.call)) and not answer.done():
                    answer.set_result(message)
            elif isinstance(message, process.Cancel) and message.number in self._running:
                for task in self._running[message.number]:
                    task.cancel()

    async def _supervise(self, request: process.Request, work: asyncio.Task[msgspec.Raw]) -> None:
        """Wait for the result of a request, at most for its time, and send it."""
        number = request.number
        began, reason, detail = time.perf_counter(), "exception", "nobody waits for it"
        with suppress(asyncio.CancelledError):
            await self._own_time(work, number, request.limit_s)
            limit_s = self._config.rollout.episode_timeout_s
            reason, detail = "timeout", f"its code took longer than {limit_s:g} s"
        if expired := not work.done():
            detail += f" (rollout.episode_timeout_s), at {waiting_at(work)}"
            work.cancel()
            await asyncio.wait([work], timeout=_GRACE_S)
        is_stuck = not work.done() or marks.is_marked(number)
        del self._running[number]
        self._asking.pop(number, None)
        result: dict[str, Any] = {"number": number, "seconds": time.perf_counter() - began}
        if not expired and not work.cancelled() and work.exception() is None:
            self._pipes.send(process.Done(**result, body=work.result()))
            return
        if not expired:
            error = asyncio.CancelledError() if work.cancelled() else work.exception()
            reason, detail = "exception", process.short_text("{}: {}", type(error).__name__, error)
            if isinstance(error, MemoryError):  # what leaked stays
                is_stuck, reason = True, "died"
        self._pipes.send(process.Failed(**result, reason=reason, detail=detail, is_stuck=is_stuck))

    async def _own_time(self, work: asyncio.Task[Any], number: int, limit_s: float) -> None:
        """Wait for `work`, until its own code has taken `limit_s`.

        The time in which it waits for a completion does not count: servers may be slow, or gone.
        """
        own_s = 0.0
        while not work.done() and own_s < limit_s:
            asked, began = self._asking[number], time.perf_counter()
            await asyncio.wait([work], timeout=min(_BEAT_S, limit_s - own_s))
            if not asked and not self._asking[number]:
                own_s += time.perf_counter() - began

    async def _result(self, request: process.Request) -> msgspec.Raw:
        kind: Any = Play | FetchPrompt | Judge
        body: Play | FetchPrompt | Judge = process.unpack(request.body, kind)
        if isinstance(body, Play):
            places = range(len(body.samples))
            samplers = [partial(self._complete, request.number, place) for place in places]
            episodes = body.episodes(samplers, self._tokenizer, steady_time)
            return process.pack(await play(self._workflow, episodes))
        if isinstance(body, FetchPrompt):
            return process.pack(self._prompts[body.split][body.index])
        if not isinstance(reason := self._filters[body.filter](body.group), str | None):
            raise TypeError(f"{body.filter} returned {reason!r:.100}, not a string or None")
        return process.pack(reason)

    async def _complete(
        self, number: int, place: int, tokens: np.ndarray, params: SamplingParams
    ) -> Completion:
        """Ask the pool for a completion. Raises ValueError if it refuses."""
        if number not in self._running:  # what the episode left behind asks
            raise ValueError("its episode has ended")
        call = next(self._calls)
        answer = self._answers[call] = asyncio.get_running_loop().create_future()
        question = process.pack(Complete(place, tokens, params))
        self._pipes.send(process.Ask(number=number, call=call, body=question))
        self._asking[number] += 1
        try:
            answered = await answer
        finally:
            del self._answers[call]
            if number in self._asking:
                self._asking[number] -= 1
        if answered.error is not None:
            raise ValueError(answered.error)
        return process.unpack(answered.body, Completion)


def main() -> None:
    pipes, worker = process.start_worker(lambda *setup: EpisodeWorker(*setup).load)
    uvloop.run(worker.serve(pipes))


if __name__ == "__main__":
    main()
