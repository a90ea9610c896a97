"""One simulated run: the real controller with modelled servers and trainer, and its numbers.

The modelled trainer pulls batches, takes its time and pushes, as `trainer/loop.py` does. It speaks
to the real controller with the real messages, one rank after the other, and knows from each rank's
shard how long the step takes.
"""

import asyncio
import json
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from areal_lite.config import TrainConfig
from areal_lite.controller.protocol import Resync
from areal_lite.controller.service import Controller
from areal_lite.controller.sources import Dependencies, Source
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rewards.pool import RewardPool
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.store import StoreThread
from areal_lite.servers.client import SGLangClient
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import InterruptMode
from benchmarks.simulate.decoding import Usage
from benchmarks.simulate.stand_ins import (
    Ledger,
    NoLag,
    NoTokenizer,
    Prompts,
    Requests,
    SimulatedEpisodes,
    SimulatedServers,
    run_virtual,
)
from benchmarks.simulate.workload import Loss, Workload

# Virtual seconds after which a batch will never come. Health checks never let time stand still.
_PATIENCE_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of a simulated run. Times are virtual seconds."""

    # wait_s, train_s, push_s: the parts of the step
    wait_s: float
    train_s: float
    push_s: float
    tokens: int  # sampled tokens of the batch
    staleness: np.ndarray  # number of trained tokens by staleness, in steps
    info: dict[str, Any]  # what the controller says about the batch, in simulated tokens


@dataclass(eq=False)
class SimulatedTrainer:
    """All ranks of the trainer. `records` has the completed steps."""

    config: TrainConfig
    controller: Controller
    servers: SimulatedServers
    work: Workload
    records: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._resyncs = 0

    async def train(self, steps: int) -> None:
        """Take `steps` more steps."""
        for _ in range(steps):
            await self._step(len(self.records))

    async def _step(self, step: int) -> None:
        started = self._loop.time()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                shards, info = await self._pull(step)
        except TimeoutError:
            raise RuntimeError(
                f"step {step} gets no batch within a day: are servers left, and do they keep up?"
            ) from None
        pulled = self._loop.time()
        grain = self.work.grain
        train_s = self.work.trainer.step_s([shard.lengths * grain for shard in shards])
        if self.config.server.takes_turns:
            self.servers.pause(self.servers.announced(), InterruptMode.RETRACT)
            train_s += self.work.trainer.turn_s
        await asyncio.sleep(train_s)
        trained = self._loop.time()
        if self.config.is_pushed(step + 1):
            await self._push(step + 1)
        else:
            await self.controller.step_done(step + 1)
        self.records.append(
            StepRecord(
                wait_s=pulled - started,
                train_s=train_s,
                push_s=self._loop.time() - trained,
                tokens=grain * sum(int((shard.versions >= 0).sum()) for shard in shards),
                staleness=grain
                * np.bincount(np.concatenate([step - s.versions[s.loss_mask] for s in shards])),
                info=info,
            )
        )

    async def _pull(self, step: int) -> tuple[list[TrainBatch], dict[str, Any]]:
        """Pull every rank's shard. Servers that start late get a push meanwhile."""
        world = self.config.trainer.data_parallel
        shards, info = [], {}
        while len(shards) < world:
            try:
                info, frames = await self.controller.pull(step, len(shards), world, self._resyncs)
                shards.append(TrainBatch.from_frames(frames))
            except Resync:
                self._resyncs += 1
                await self._push(step)
        return shards, info

    async def _push(self, version: int) -> None:
        """Push the weights of `version` to the servers that the controller names."""
        targets = await self.controller.begin_push(version)
        await asyncio.sleep(self.work.trainer.prepare_s)
        mode = self.config.rollout.interrupt
        self.servers.pause(
            targets.servers, InterruptMode.RETRACT if mode == InterruptMode.NONE else mode
        )
        await asyncio.sleep(self.work.trainer.pause_s)
        failed = self.servers.resume(targets.servers, version)
        await self.controller.pushed(version, failed)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The measured part of a simulated run."""

    records: list[StepRecord]  # the measured steps
    seconds: float  # their virtual time
    usage: Usage  # what the servers did in that time, summed over servers
    groups: dict[str, int]  # the number of groups in each state at the end
    counts: dict[str, int]  # of the dispatcher and the fleet, over the whole run


def simulate(config: TrainConfig, work: Workload) -> Outcome:
    """Run `config` in virtual time. Equal arguments give equal outcomes."""
    with TemporaryDirectory() as folder, closing(Ledger(Path(folder) / STORE_FILE)) as ledger:
        ledger.begin()  # one transaction, which is never written to the disk
        return run_virtual(_simulate(_settings(config, work), work, ledger))


def _settings(config: TrainConfig, work: Workload) -> TrainConfig:
    """Return the settings of the controller, which counts in simulated tokens."""
    config = deepcopy(config)
    rollout = config.rollout
    rollout.max_new_tokens = -(-rollout.max_new_tokens // work.grain)
    rollout.stop = []  # its tokens have no text
    config.store.max_gib = None
    # Generation does not run dry at the end of what is measured.
    ahead = work.warm_up + work.steps + config.buffer.max_staleness + 2 * config.sync.every
    config.trainer.steps = max(config.trainer.steps, ahead)
    return config


async def _simulate(config: TrainConfig, work: Workload, ledger: Ledger) -> Outcome:
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
    controller = _controller(config, work, servers, ledger)
    trainer = SimulatedTrainer(config, controller, servers, work)
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
        records=trainer.records[work.warm_up :],
        seconds=loop.time() - began,
        usage=servers.usage().since(before),
        groups=ledger.counts(),
        counts={
            **controller.dispatcher.counts,
            "filtered": controller.dispatcher.filtered.total(),
            **controller.fleet.counts,
        },
    )


def _controller(
    config: TrainConfig, work: Workload, servers: SimulatedServers, ledger: Ledger
) -> Controller:
    """Build the real controller around the stand-ins."""
    source = Source(
        config=config,
        prompts=Prompts(max(1, round(work.prompt_tokens / work.grain))),
        eval_prompts=None,
        rewards=cast(RewardPool, None),
    )
    dependencies = Dependencies(
        sources={"": source},
        tokenizer=cast(Tokenizer, NoTokenizer()),
        store=cast(StoreThread, ledger),
        clock=asyncio.get_running_loop().time,
        workflow=SimulatedEpisodes(work, config.seed, config.rollout.group_size),
    )
    client = cast(SGLangClient, servers)
    controller = Controller(config, dependencies, client, servers.announced)
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
    if loss is None:
        return
    await asyncio.sleep(loss.after_s)
    gone = servers.lose(loss.servers)
    if loss.return_s is not None:
        await asyncio.sleep(loss.return_s)
        servers.bring_back(gone)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a simulated run. Shares are of its time, per token or per server."""

    tokens_per_s: float  # sampled tokens that were trained on, in a second
    generated_per_s: float  # tokens that the servers generated in a second
    step_s: float  # seconds of a step
    # train_share, push_share, wait_share: of the trainer's time
    train_share: float
    push_share: float
    wait_share: float
    # decode_share, prefill_share, pause_share, idle_share: of the servers' time
    decode_share: float
    prefill_share: float
    pause_share: float
    idle_share: float
    batch: float  # sequences that a server decodes at a time, while it decodes
    # staleness_mean, staleness_max: in steps, of the tokens that were trained on
    staleness_mean: float
    staleness_max: int
    staleness: list[float]  # share of these tokens by staleness, from 0
    masked_share: float  # tokens that were too stale to train on
    interrupted_share: float  # trajectories with tokens of more than one version
    preempted: int  # requests that lost their KV cache because it was full

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for a JSON file, rounded to four digits."""
        return rounded(asdict(self))


def rounded(value: Any) -> Any:
    """Round every number in a value of JSON to four digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.4g}"))


def summarize(outcome: Outcome) -> Summary:
    """Summarize the measured steps of a run."""
    records, seconds, usage = outcome.records, outcome.seconds, outcome.usage
    tokens = sum(record.tokens for record in records)
    bins = max(len(record.staleness) for record in records)
    ages = np.sum([np.pad(r.staleness, (0, bins - len(r.staleness))) for r in records], axis=0)
    trained = max(1, int(ages.sum()))
    server_s = usage.decoding_s + usage.prefill_s + usage.paused_s + usage.idle_s
    return Summary(
        tokens_per_s=tokens / seconds,
        generated_per_s=usage.tokens / seconds,
        step_s=seconds / len(records),
        train_share=sum(record.train_s for record in records) / seconds,
        push_share=sum(record.push_s for record in records) / seconds,
        wait_share=sum(record.wait_s for record in records) / seconds,
        decode_share=usage.decoding_s / server_s,
        prefill_share=usage.prefill_s / server_s,
        pause_share=usage.paused_s / server_s,
        idle_share=usage.idle_s / server_s,
        batch=usage.sequence_s / max(usage.decoding_s, 1e-9),
        staleness_mean=float(ages @ np.arange(bins)) / trained,
        staleness_max=int(np.flatnonzero(ages).max(initial=0)),
        staleness=(ages / trained).tolist(),
        masked_share=1 - trained / tokens,
        interrupted_share=float(np.mean([r.info["interrupted_share"] for r in records])),
        preempted=round(usage.preempted),
    )
