"""Compare ways to place a group: on one server, each sample on the least loaded, `Fleet.place`.

    python -m benchmarks.routing     # five minutes on one core

The fleet is the real one, its servers are modelled (simulate/decoding.py): small ones without a
GPU, where each sequence makes a step longer, and an H100 with a model of 7B, which is limited by
bandwidth. Samples of a group have log-normal lengths with a common part. A server computes a prompt
once for a group, and of later turns what is new. A case has `each` trajectories for each server at
a time, and admits a group when there is room for it. `one` and `each` are what `place` is compared
with, and `tokens` gives a group to the server with the fewest tokens left, which only an oracle
knows. Results are tokens a second against `one`: the mean of seeds, with the lowest and highest.

Writes results/routing.json.
"""

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from areal_lite.servers.client import GenerationChunk, SamplingParams, SGLangClient
from areal_lite.servers.fleet import Fleet, Session
from areal_lite.servers.registry import ServerInfo
from benchmarks.simulate.decoding import Generation, ServerSpeed
from benchmarks.simulate.stand_ins import TOKEN, Requests, SimulatedServers, run_virtual
from benchmarks.simulate.workload import LogNormalLengths

RESULTS = Path(__file__).with_name("results") / "routing.json"
SEEDS, GROUP = 5, 8
CPU = ServerSpeed(
    step_s=0.016, per_sequence_s=0.001, per_context_s=1e-6, prefill_s=0.0008, kv_tokens=32_000
)
GPU = ServerSpeed(
    step_s=0.0095, per_sequence_s=3.1e-5, per_context_s=2.4e-8, prefill_s=3.1e-5, kv_tokens=960_000
)


class Case(NamedTuple):
    servers: int
    each: int  # trajectories for each server at a time
    speed: ServerSpeed
    lengths: LogNormalLengths
    prompt: int  # tokens
    turns: int = 1  # mean; a turn adds as many tokens of a tool as `prompt`
    tool_s: float = 0.0


def cases() -> dict[str, Case]:
    short = LogNormalLengths(mean=85, spread=0.9, longest=512)
    long = LogNormalLengths(mean=2300, spread=1.0, longest=16_384)
    turn = LogNormalLengths(mean=330, spread=1.0, longest=4096)
    found = {}
    for number in (2, 4, 8):
        for each in (each for each in (1, 4, 16) if number * each >= GROUP):
            found[f"cpu, {number} x {each}"] = Case(number, each, CPU, short, 60)
        found[f"gpu, {number} x 8"] = Case(number, 8, GPU, long, 200)
        found[f"gpu, {number} x 64"] = Case(number, 64, GPU, long, 200)
        found[f"agents, {number} x 64"] = Case(number, 64, GPU, turn, 400, turns=8, tool_s=4)
    return found


@dataclass(frozen=True)
class _Rest(Requests):
    """Requests of which a server has to compute `new` tokens."""

    new: float = 0.0

    def generation(self, num_ids: int, max_new_tokens: int, begun: int, version: int) -> Generation:
        return Generation(context=num_ids, target=max_new_tokens, prefill=self.new)


class CachingServers(SimulatedServers):
    """Servers that keep the prompts of groups and the turns of trajectories."""

    def __init__(self, case: Case):
        super().__init__(case.servers, 1, case.speed, Requests(grain=1, prompt_tokens=0))
        self._kept: dict[tuple[ServerInfo, str], int] = {}

    async def generate(
        self, server: ServerInfo, input_ids: np.ndarray, params: SamplingParams, rid: str, key: str
    ) -> GenerationChunk:
        _, group, sample, *_ = rid.split("-")
        names = [(server, group), (server, f"{group}-{sample}")]
        known = max(self._kept.get(name, 0) for name in names)
        self._kept.setdefault(names[0], len(input_ids))
        self._kept[names[1]] = len(input_ids) + params.max_new_tokens
        new = max(len(input_ids) - known, 1)
        self._requests = _Rest(grain=1, prompt_tokens=0, new=new)
        return await super().generate(server, input_ids, params, rid, key)

    def left(self, server: ServerInfo) -> float:
        """Return the tokens that the requests of a server have yet to get."""
        model = self._slots[server].model
        self._advance(self._slots[server])
        running = sum(r.target - r.done - model._steps + r.begun_at for r in model.running)
        return running + sum(request.target for request in model.waiting)


Rule = Callable[[Fleet, CachingServers], Awaitable[list[ServerInfo]]]


async def _one(fleet: Fleet, _: CachingServers) -> list[ServerInfo]:
    first = await fleet.reserve()
    return [first, *[await fleet.reserve([first]) for _ in range(GROUP - 1)]]


async def _each(fleet: Fleet, _: CachingServers) -> list[ServerInfo]:
    return [await fleet.reserve() for _ in range(GROUP)]


async def _tokens(fleet: Fleet, servers: CachingServers) -> list[ServerInfo]:
    best = min(servers.announced(), key=servers.left)
    return [await fleet.reserve([best]) for _ in range(GROUP)]


RULES: dict[str, Rule] = {
    "one": _one,
    "each": _each,
    "tokens": _tokens,
    "place": lambda fleet, _: fleet.place(GROUP),
}


def tokens_per_s(case: Case, rule: Rule, seed: int) -> float:
    """Return the tokens a second until the last group is admitted, in virtual time."""
    return run_virtual(_run(case, rule, seed))


async def _run(case: Case, rule: Rule, seed: int) -> float:
    loop, servers = asyncio.get_running_loop(), CachingServers(case)
    fleet = Fleet(
        cast(SGLangClient, servers), servers.announced, lambda: None, health_interval_s=1e9
    )
    watch = asyncio.create_task(fleet.watch())
    await asyncio.sleep(0.1)
    free, rng = asyncio.Semaphore(max(case.servers * case.each, GROUP)), np.random.default_rng(seed)

    async def episode(session: Session, turns: int, lengths: np.ndarray, waits: np.ndarray) -> None:
        context = case.prompt
        for length, wait in zip(lengths[:turns].tolist(), waits):
            params = SamplingParams(length, 1.0, (0,))
            await fleet.complete(session, np.full(context, TOKEN, np.int32), params)
            context += length + case.prompt
            await asyncio.sleep(wait if session.turns < turns else 0)
        free.release()

    async with asyncio.TaskGroup() as episodes:
        for group in range(15 * max(case.servers * case.each // GROUP, 2)):
            for _ in range(GROUP):
                await free.acquire()
            turns = rng.geometric(1 / case.turns, GROUP).clip(1, 4 * case.turns)
            most = int(turns.max())
            lengths = [case.lengths.group(seed, 100 * group + turn, GROUP) for turn in range(most)]
            waits = rng.exponential(case.tool_s, (GROUP, most))
            chosen = await rule(fleet, servers)
            for n, server in enumerate(chosen):
                session = Session(f"{group}-{n}", server)
                work = episode(session, int(turns[n]), np.array(lengths)[:, n], waits[n])
                episodes.create_task(work)
            await asyncio.sleep(0)
        speed = servers.usage().tokens / loop.time()
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    return speed


def main() -> None:
    results: dict[str, dict[str, list[float]]] = {}
    for name, case in cases().items():
        speeds = {
            rule: [tokens_per_s(case, call, seed) for seed in range(SEEDS)]
            for rule, call in RULES.items()
        }
        results[name] = {}
        for rule in list(RULES)[1:]:
            ratios = [own / one for own, one in zip(speeds[rule], speeds["one"])]
            found = statistics.mean(ratios), min(ratios), max(ratios)
            results[name][rule] = [round(ratio, 3) for ratio in found]
        print(f"{name:20s} {json.dumps(results[name])}", flush=True)
    RESULTS.write_text(json.dumps({"ratio to one server for a group": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
