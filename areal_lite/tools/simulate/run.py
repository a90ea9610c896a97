"""One simulated run: the real controller with modelled servers and trainer, in virtual time."""

import asyncio
import time
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from areal_lite.config import TrainConfig
from areal_lite.controller.controller import Controller
from areal_lite.controller.dependencies import Dependencies
from areal_lite.controller.sources import Source
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.pool import RewardPool
from areal_lite.run_dir.store_thread import StoreThread
from areal_lite.tools.simulate.clock import run_virtual
from areal_lite.tools.simulate.decoding import Usage
from areal_lite.tools.simulate.episodes import SimulatedEpisodes
from areal_lite.tools.simulate.lengths import Lengths
from areal_lite.tools.simulate.servers import Requests, SimulatedServers
from areal_lite.tools.simulate.speed import ServerSpeed
from areal_lite.tools.simulate.stand_ins import Ledger, NoLag, NoRewards, NoTokenizer, Prompts
from areal_lite.tools.simulate.trainer import SimulatedTrainer, StepRecord, TrainerSpeed


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Servers that are lost after the warm-up.

    Args:
        servers: how many.
        after_s: seconds after the warm-up.
        return_s: seconds until they are up again; None: they stay away.
    """

    servers: int
    after_s: float
    return_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The lengths, speeds and failures of a simulated run.

    Args:
        lengths: draws the lengths of completions, in tokens.
        server, trainer: how fast they are.
        prompt_tokens: length of a prompt.
        share_prompts: whether the requests of a group share the computation of their prompt.
        uniform_share: share of the groups whose rewards are all equal.
        reward_s: seconds until a completion has its reward.
        warm_up: steps before the measured ones. steps: measured steps.
        grain: tokens that a simulated token stands for.
        loss: servers that are lost.
    """

    lengths: Lengths
    server: ServerSpeed
    trainer: TrainerSpeed
    prompt_tokens: int = 1
    share_prompts: bool = True
    uniform_share: float = 0.0
    reward_s: float = 0.0
    warm_up: int = 5
    steps: int = 20
    grain: int = 1
    loss: Loss | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The measured part of a simulated run.

    Args:
        config: the settings.
        records: the measured steps.
        seconds: their virtual time.
        usage: what the servers did in that time, summed over servers.
        groups: the number of groups in each state at the end.
        counts: of the dispatcher and the fleet, over the whole run.
        computed_s: real seconds that the simulation took.
    """

    config: TrainConfig
    records: list[StepRecord]
    seconds: float
    usage: Usage
    groups: dict[str, int]
    counts: dict[str, int]
    computed_s: float


def simulate(config: TrainConfig, work: Workload) -> Outcome:
    """Run `config` in virtual time. Equal arguments give equal outcomes, `computed_s` excepted."""
    return run_virtual(_simulate(_settings(config, work), work))


def _settings(config: TrainConfig, work: Workload) -> TrainConfig:
    """Return the settings of the controller, which counts in simulated tokens."""
    config = deepcopy(config)
    rollout = config.rollout
    rollout.max_new_tokens = -(-rollout.max_new_tokens // work.grain)
    rollout.record_text = False
    # Generation does not run dry at the end of what is measured.
    ahead = work.warm_up + work.steps + config.buffer.max_staleness + 2 * config.sync.every
    config.trainer.steps = max(config.trainer.steps, ahead)
    return config


async def _simulate(config: TrainConfig, work: Workload) -> Outcome:
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    rollout = config.rollout
    servers = SimulatedServers(
        config.server.count,
        config.server.tensor_parallel,
        work.server,
        Requests(
            grain=work.grain,
            prompt_tokens=work.prompt_tokens,
            sharing=rollout.group_size if work.share_prompts else 1,
        ),
    )
    ledger = Ledger()
    controller = _controller(config, work, servers, ledger)
    trainer = SimulatedTrainer(config, controller, servers, work.trainer, work.grain)
    generation = asyncio.create_task(controller.run())
    try:
        await _unless_ended(generation, trainer.train(work.warm_up))
        before, began = servers.usage(), loop.time()
        loss = asyncio.create_task(_lose(servers, work.loss))
        await _unless_ended(generation, trainer.train(work.steps))
        loss.cancel()
    finally:
        generation.cancel()
        await asyncio.wait([generation])
        await servers.close()
    return Outcome(
        config=config,
        records=trainer.records[work.warm_up :],
        seconds=loop.time() - began,
        usage=servers.usage().since(before),
        groups=ledger.counts(),
        counts={
            **controller.dispatcher.counts,
            "filtered": controller.dispatcher.filtered.total(),
            "drained": controller.drained,
            **controller.fleet.counts,
        },
        computed_s=time.perf_counter() - started,
    )


def _controller(
    config: TrainConfig, work: Workload, servers: SimulatedServers, ledger: Ledger
) -> Controller:
    """Build the real controller around the stand-ins."""
    source = Source(
        config=config,
        prompts=Prompts(max(1, round(work.prompt_tokens / work.grain))),
        eval_prompts=None,
        rewards=cast(RewardPool, NoRewards()),
    )
    dependencies = Dependencies(
        sources={"": source},
        tokenizer=cast(Tokenizer, NoTokenizer()),
        store=cast(StoreThread, ledger),
        clock=asyncio.get_running_loop().time,
        workflow=SimulatedEpisodes(
            work.lengths,
            seed=config.seed,
            group_size=config.rollout.group_size,
            grain=work.grain,
            uniform_share=work.uniform_share,
            reward_s=work.reward_s,
        ),
    )
    controller = Controller(config, dependencies, servers, servers.announced)
    controller.batches.lag = cast(Any, NoLag())
    return controller


async def _unless_ended(generation: asyncio.Task[None], work: Any) -> None:
    """Run `work`. Raises the error of `generation` if that ends first."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({generation, task}, return_when=asyncio.FIRST_COMPLETED)
    if generation.done():
        task.cancel()
        await generation
    await task


async def _lose(servers: SimulatedServers, loss: Loss | None) -> None:
    """Lose servers as planned, and bring them back."""
    if loss is None:
        return
    await asyncio.sleep(loss.after_s)
    gone = servers.lose(loss.servers)
    if loss.return_s is not None:
        await asyncio.sleep(loss.return_s)
        servers.bring_back(gone)
