"""A run directory that is made by the real parts, one event at a time, without any process.

`History` does to store, sampler, queue and logs what controller and trainer do, kills included.
"""

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from areal_lite.config import TrainConfig, source_configs
from areal_lite.config.data import weight_of
from areal_lite.controller.batches import batch_stats
from areal_lite.controller.buffer import GroupQueue, ReplayBuffer
from areal_lite.controller.dispatcher import Curriculum
from areal_lite.data.sampler import PromptSampler, SourceOrder
from areal_lite.run_dir.metrics import STEP_KEYS, MetricsLog, append_event, forget_after
from areal_lite.run_dir.resume import needed_since, start_version, write_manifest
from areal_lite.run_dir.store import Store
from areal_lite.system.files import publish_folder, scratch_folder, write_atomically, write_json
from areal_lite.trajectory import Group, GroupState, Trajectory

SIZE = 3  # trajectories of a group
TICK_S = 10.0
Sizes = int | None | dict[str, int | None]


_written: dict[str, str] = {}


def _as_yaml(config: TrainConfig) -> str:
    config = replace(config, run_dir="r")
    if (key := repr(config)) not in _written:
        _written[key] = OmegaConf.to_yaml(OmegaConf.structured(config))
    return _written[key]


class History:
    """A run of groups of three, with batches of two.

    Args:
        run_dir: a new folder, or that of a run, which goes on.
        num_prompts: size of the data set, or of each of `data.sources`; None for no end.
        config: changes of the settings, such as {"buffer.max_staleness": 1}.
    """

    def __init__(self, run_dir: Path, num_prompts: Sizes = 5, **config: object):
        self.run_dir, self.num_prompts = run_dir, num_prompts
        self.config = TrainConfig(model="m", run_dir=str(run_dir))
        self.config.trainer.batch_groups, self.config.rollout.group_size = 2, SIZE
        self.config.trainer.steps, self.config.buffer.max_staleness = 1000, 2
        self.config.seed = 3
        for key, value in config.items():
            section, name = key.split("__")
            setattr(getattr(self.config, section), name, value)
        starts = len(list(run_dir.glob("config*.yaml")))
        self.random = random.Random(starts)
        self.now = 1_700_000_000.0 + 1e6 * starts
        self.start()

    def start(self) -> None:
        """Begin, or go on from the newest checkpoint."""
        self.write_config()
        self.step = self.version = start_version(self.run_dir)
        forget_after(self.run_dir, self.step)
        self.metrics = MetricsLog(self.run_dir, self.config.logger, {})
        self.store = Store(self.run_dir / "trajectories.sqlite")
        recovered = self.store.recover(self.step, self.tick())
        sizes = self.num_prompts if isinstance(self.num_prompts, dict) else {"": self.num_prompts}
        self.sampler = PromptSampler(
            *(
                SourceOrder(sizes[name], own.seed, weight_of(own.data), name)
                for name, own in source_configs(self.config).items()
            )
        )
        rollout = self.config.rollout
        self.curriculum = Curriculum(self.sampler, rollout.retire_above, rollout.rest_unsolved)
        for scored in self.store.rewards():
            self.curriculum.record(*scored)
        self.store.set_totals(self.sampler.sizes)
        self.sampler.resume(recovered.drawn, recovered.put_back)
        self.prompts = [row["prompt_index"] for row in self.store.groups()]
        self.drawn = [row["drawn"] for row in self.store.groups()]
        self.flying: list[int] = []
        buffer = self.config.buffer
        self.queue: GroupQueue
        if buffer.replay.capacity:
            self.queue = ReplayBuffer(buffer.replay, SIZE, self.config.seed)
            for group, used in self.store.finished_groups():
                self.queue.put(group, used)
        else:
            self.queue = GroupQueue(buffer.max_staleness)
            for group in self.store.waiting_groups():
                self.queue.put(group)

    def write_config(self) -> None:
        """Write the settings as `save_config` does; that one takes a second for each start."""
        path = self.run_dir / "config.yaml"
        if path.exists():
            number = 1 + len(list(self.run_dir.glob("config-*.yaml")))
            os.link(path, path.with_name(f"config-{number}.yaml"))
        write_atomically(path, _as_yaml(self.config))

    def tick(self) -> float:
        """Return the time, which goes on with each call."""
        self.now += TICK_S * self.random.uniform(0.5, 1.5)
        return self.now

    def admit(self, _: int = 0) -> None:
        """Hand out the next prompt."""
        index, group_id = self.sampler.next(), len(self.prompts)
        self.store.admit(group_id, f"p{index}", index, self.sampler.drawn, SIZE, self.tick())
        self.prompts.append(index)
        self.drawn.append(self.sampler.drawn)
        self.flying.append(group_id)

    def finish(self, which: int = 0, state: GroupState = GroupState.FINISHED) -> None:
        """End a group that is in flight; every third one lacks a trajectory."""
        if not self.flying:
            return
        group_id = self.flying.pop(which % len(self.flying))
        number = SIZE - (group_id % 3 == 0)
        group = Group(
            group_id=group_id,
            prompt_id=f"p{self.prompts[group_id]}",
            size=SIZE,
            trajectories=[
                replace(self.trajectory(group_id, index), trace_index=trace)
                for index in range(number)
                for trace in range(self.random.choice([1, 1, 3]))
            ],
            prompt_index=self.prompts[group_id],
        )
        self.curriculum.record(group.prompt_index, group.rewards, self.drawn[group_id])
        reason = "why" if state == GroupState.FILTERED else None
        texts: list[tuple[str | None, str | None]] = [("p", "c")] * len(group.trajectories)
        self.store.begin()
        self.store.finish(group, texts, reason, self.tick(), state)
        self.store.commit()
        if state == GroupState.FINISHED:
            self.queue.put(group)

    def filter(self, which: int = 0) -> None:
        """End a group that a filter leaves out."""
        self.finish(which, GroupState.FILTERED)

    def fail(self, which: int = 0) -> None:
        """End a group without any trajectory."""
        if self.flying:
            self.drop(self.flying.pop(which % len(self.flying)), "empty: why")

    def drop(self, group_id: int, reason: str) -> None:
        """Drop a group, whose prompt is handed out again."""
        self.store.drop(group_id, reason, self.tick())
        self.sampler.put_back(self.prompts[group_id])

    def trajectory(self, group_id: int, index: int) -> Trajectory:
        """Make a trajectory of the newest versions, sometimes with a turn of the environment."""
        length = self.random.randrange(1, 9)
        versions = [self.version - self.random.randrange(min(self.version, 4) + 1)]
        while len(versions) < length:
            newer = self.random.random() < 0.3 and versions[-1] < self.version
            versions.append(versions[-1] + newer)
        if length > 4 and group_id % 2:
            versions[2] = -1
        array = np.array([-1, -1, *versions], np.int32)
        started = self.tick()
        return Trajectory(
            group_id=group_id,
            prompt_id=f"p{self.prompts[group_id]}",
            sample_index=index,
            tokens=np.array(self.random.choices(range(99), k=length + 2), np.int32),
            loss_mask=array >= 0,
            behavior_logprobs=np.where(array >= 0, -0.5, 0).astype(np.float32),
            versions=array,
            finish_reason="stop",
            # Nothing solves the first prompt.
            reward=self.random.choice([0.0, 0.25, 1.0]) * (self.prompts[group_id] > 0),
            started_at=started,
            finished_at=self.tick(),
        ).check()

    def train(self, _: int = 0) -> None:
        """Train one step, if there is a batch, and push every `sync.every` steps."""
        lag, buffer = self.step - self.version, self.config.buffer
        if (batch := self.queue.take(2, self.step, 1)) is None:
            return
        bound = None if buffer.replay.capacity else buffer.max_staleness
        stats = batch_stats(batch.groups, self.step, bound)
        first = int(batch.shards[0].group_ids[0])
        append_event(self.run_dir, "proximal", {"step": self.step, "group_id": first, "prox": {}})
        self.store.begin(durable=True)
        self.store.use(batch.group_ids, self.step, batch.draws)
        self.store.commit()
        self.step += 1
        if self.step % self.config.sync.every == 0:
            self.version = self.step
        masked = batch.masked_tokens
        row = {**dict.fromkeys(STEP_KEYS, 0.0), **stats, "masked_tokens": masked}
        row |= {"masked_overdue": masked, "trained_tokens": stats["tokens"] - masked}
        self.metrics.log(row | {"step": self.step, "version": self.version, "server_lag": lag})
        if self.step % 4 == 0:
            record = {"version": self.version, "versions": [self.version]}
            self.metrics.log_evaluation(record)

    def save(self, _: int = 0) -> None:
        """Write a checkpoint, unless this step has one."""
        folder = self.run_dir / "checkpoints" / f"step-{self.step}"
        if self.step and not folder.exists():
            scratch = scratch_folder(folder)
            (scratch / "weights").write_bytes(bytes(range(256)) * 4)
            write_manifest(scratch, {})
            publish_folder(scratch, folder)

    def trim(self, _: int = 0) -> None:
        """Remove the tokens of all groups that need them no longer."""
        held = list(self.queue.group_ids) if isinstance(self.queue, ReplayBuffer) else None
        more = True
        while more:
            self.store.begin()
            more = self.store.trim(1, needed_since(self.run_dir), held)
            self.store.commit()

    def kill(self, _: int = 0) -> None:
        """Kill every role, and go on."""
        self.close()
        self.start()

    def close(self) -> None:
        """Close the files."""
        self.metrics.close()
        self.store.close()

    def end(self) -> None:
        """End the run in good order."""
        totals = {"groups": self.store.counts(), "trajectories_lost": 0, **self.store.failures()}
        totals["filtered"] = dict(self.store.filtered())
        self.close()
        write_json(self.run_dir / "controller_totals.json", totals)


EVENTS = ["admit"] * 5 + ["finish"] * 4 + ["train"] * 2 + ["filter", "fail", "save", "kill"]


def lived(run_dir: Path, **config: object) -> History:
    """Make a run of some length, with every kind of event."""
    run = History(run_dir, **config)
    events = random.Random(7)
    for _ in range(260):
        getattr(run, events.choice(EVENTS))(events.randrange(9))
    run.save()
    for _ in range(2):
        while len(run.flying) < 4:
            run.admit()
        run.finish()
        run.finish()
        run.train()
    run.admit()
    run.end()
    return run
