"""The modelled trainer: pulls batches, takes its time, pushes, as `trainer/loop.py` does.

It speaks to the real controller with the real messages, one rank after the other, and knows from
each rank's shard how long the step takes.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_lite.config import TrainConfig
from areal_lite.controller.controller import Controller
from areal_lite.controller.protocol import (
    BatchReady,
    BeginPush,
    PullBatch,
    Pushed,
    PushTargets,
    Request,
    Resync,
    StepDone,
)
from areal_lite.tools.simulate.servers import SimulatedServers
from areal_lite.tools.simulate.workload import TrainerSpeed
from areal_lite.train_batch import TrainBatch
from areal_lite.trainer.cadence import Cadence
from areal_lite.trajectory import InterruptMode

# Virtual seconds after which a batch will never come. Health checks never let time stand still.
_PATIENCE_S = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of a simulated run. Times are virtual seconds."""

    step: int  # number of completed steps after it
    ended_at: float  # the end of the step, its push included
    # wait_s, train_s, push_s: its parts
    wait_s: float
    train_s: float
    push_s: float
    tokens: int  # sampled tokens of the batch
    all_tokens: int  # with the prompts
    staleness: np.ndarray  # number of trained tokens by staleness, in steps
    info: dict[str, Any]  # what the controller says about the batch, in simulated tokens


class SimulatedTrainer:
    """All ranks of the trainer. `records` has the completed steps."""

    def __init__(
        self,
        config: TrainConfig,
        controller: Controller,
        servers: SimulatedServers,
        speed: TrainerSpeed,
        grain: int,
    ):
        self._config = config
        self._controller = controller
        self._servers = servers
        self._speed = speed
        self._grain = grain
        self._loop = asyncio.get_running_loop()
        self._cadence = Cadence(every=config.sync.every, eval_every=0, steps=config.trainer.steps)
        self._pushed = 0
        self._resyncs = 0
        self.records: list[StepRecord] = []

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
        grain = self._grain
        train_s = self._speed.step_s([shard.lengths * grain for shard in shards])
        await asyncio.sleep(train_s)
        trained = self._loop.time()
        await self._push_if_due(step + 1)
        self.records.append(
            StepRecord(
                step=step + 1,
                ended_at=self._loop.time(),
                wait_s=pulled - started,
                train_s=train_s,
                push_s=self._loop.time() - trained,
                tokens=grain * sum(int((shard.versions >= 0).sum()) for shard in shards),
                all_tokens=grain * sum(len(shard.tokens) for shard in shards),
                staleness=grain
                * np.bincount(np.concatenate([step - s.versions[s.loss_mask] for s in shards])),
                info=info,
            )
        )

    async def _pull(self, step: int) -> tuple[list[TrainBatch], dict[str, Any]]:
        """Pull every rank's shard. Servers that start late get a push meanwhile."""
        world = self._config.trainer.data_parallel
        shards, info = [], {}
        while len(shards) < world:
            request = PullBatch(step, len(shards), world, self._resyncs)
            response, frames = await self._controller.handle(request)
            if isinstance(response, Resync):
                self._resyncs += 1
                await self._push(step)
                continue
            assert isinstance(response, BatchReady)
            shards.append(TrainBatch.from_frames(frames))
            info = response.info
        return shards, info

    async def _push_if_due(self, done: int) -> None:
        if self._cadence.pushes(done):
            await self._push(done)
        else:
            await self._handle(StepDone(done))

    async def _push(self, version: int) -> None:
        """Push the weights of `version` to the servers that the controller names."""
        targets = await self._handle(BeginPush(version))
        assert isinstance(targets, PushTargets)
        await asyncio.sleep(self._speed.prepare_s)
        mode = self._config.rollout.interrupt
        self._servers.pause(
            targets.servers, InterruptMode.RETRACT if mode == InterruptMode.NONE else mode
        )
        await asyncio.sleep(self._speed.pause_s)
        failed = self._servers.resume(targets.servers, version)
        await self._handle(Pushed(version, failed))
        self._pushed = version

    async def _handle(self, request: Request) -> Any:
        return (await self._controller.handle(request))[0]
