"""The batches: assign exactly one batch to each step; each rank pulls its shard.

* Every rank can pull its shard any number of times. All ranks see the same order of batches and
  resyncs.
* While the trainer waits for a batch anyway, it pushes its weights to stale servers (`Resync`).
* `step` counts the trainer's completed steps. With `sync.every`, only some of them end with a push.

The trainer loses no step when its controller is killed. Its ranks wait for the next controller, and
ask it what the last one did not answer (protocol.py). The answers must fit what other ranks have
been told. The store therefore knows, before any rank does:

* the batch that was assigned to a step (`Store.assign`);
* how many resyncs were requested. Every rank makes them in the same order relative to the batches;
* the version of the last push, and whether a push is going on. Servers are trusted to have the
  version that they report unless one was;
* whether the evaluation of the last version has ended.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_lite.config import TrainConfig
from areal_lite.controller.buffer import BatchAssignment, GroupQueue, ReplayBuffer
from areal_lite.controller.dispatcher import Dispatcher
from areal_lite.controller.protocol import Resync
from areal_lite.controller.sources import judge_facts, of_source
from areal_lite.run_dir.store import Store, StoreThread
from areal_lite.servers.fleet import Fleet
from areal_lite.trajectory import FinishReason, Group, Trajectory, episode_reward

# Names in the table `totals` of the store.
RESYNCS = "handover_resyncs"  # requested since the trainer's start
VERSION = "handover_version"  # of the last push
PUSHING = "handover_pushing"  # 1 between the beginning and the end of a push
EVALUATED = "handover_evaluated"  # 1 after the end of the evaluation of the last version

_INTERVAL_S = 0.01


class LoopLag:
    """Measures the lag of the running event loop."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []

    async def watch(self) -> None:
        """Sleep and measure. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._lags_s.append(loop.time() - due)

    def take_p99(self) -> float:
        """Return the 99th percentile of the lags since the last call, in seconds; 0 if none."""
        lags, self._lags_s = self._lags_s, []
        return float(np.quantile(lags, 0.99)) if lags else 0.0


@dataclass(slots=True, eq=False)
class Batches:
    """Assigns finished groups to steps."""

    config: TrainConfig
    dispatcher: Dispatcher
    fleet: Fleet
    store: StoreThread
    clock: Callable[[], float]  # returns wall-clock seconds
    step: int = 0  # completed steps
    queue: GroupQueue = field(init=False)
    lag: LoopLag = field(default_factory=LoopLag)
    was_asked: bool = False  # whether a rank has come
    store_mib: float = 0.0  # the size of the store after the step before
    # Set, and replaced by a new one, when a batch may have become ready.
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    # By step. A task ends when the batch is assigned.
    _assignments: dict[int, asyncio.Task[BatchAssignment]] = field(default_factory=dict)
    # How many resyncs were requested, the event of the next one, and whether one is pending.
    _resyncs: int = 0
    _resync_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _resyncing: bool = False
    # Since when a whole batch waits for an older group, in wall-clock seconds.
    _held_since: float | None = None
    # The batch of the present step, if an earlier controller has assigned it.
    _inherited: list[Group] = field(default_factory=list)

    def __post_init__(self) -> None:
        buffer, rollout = self.config.buffer, self.config.rollout
        if buffer.replay.capacity:
            self.queue = ReplayBuffer(buffer.replay, rollout.group_size, self.config.seed)
        else:
            self.queue = GroupQueue(buffer.max_staleness, buffer.window)

    def recover(self, store: Store, step: int, resyncs: int) -> None:
        """Resume after `step` steps and `resyncs` with the finished groups of `store`."""
        self.step, self._resyncs = step, resyncs
        self._inherited = store.assigned_groups(step)
        if isinstance(self.queue, ReplayBuffer):
            for group, used in store.finished_groups():
                self.queue.put(group, used)
        else:
            for group in store.waiting_groups():
                self.queue.put(group)

    def put(self, group: Group) -> None:
        """Queue a finished group, which may complete a batch."""
        self.queue.put(group)
        self.notify()

    def notify(self) -> None:
        """Wake everything that waits for a batch."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def pending(self) -> list[int]:
        """Return the steps whose batch was asked for and is not complete."""
        return [step for step, task in self._assignments.items() if not task.done()]

    def on_push(self) -> None:
        """Record the end of a push: servers that are stale after it need another one."""
        self._resyncing = False

    def on_step(self, step: int) -> list[tuple[int, list[int], list[list[tuple[int, int]]]]]:
        """Record that `step` steps are complete. Return step, groups, draws of each used batch."""
        used = []
        if self._inherited and step > self.step:  # every rank has it from an earlier controller
            used.append((self.step, [group.group_id for group in self._inherited], []))
            self._inherited = []
        self.step = step
        self.notify()
        done = [s for s, task in self._assignments.items() if s < step and task.done()]
        for s in done:
            batch = self._assignments.pop(s).result()
            used.append((s, batch.group_ids, batch.draws))
        return used

    async def pull(
        self, step: int, rank: int, world: int, resyncs: int = 0
    ) -> tuple[dict[str, Any], Sequence[bytes | memoryview]]:
        """Return facts about the batch of a step, and the frames of a rank's shard of it.

        Raises Resync if one is requested that is not among the `resyncs` that the rank has had, and
        ValueError for a step that is over and for another number of ranks.
        """
        asked = f"the batch of step {step} (rank {rank} of {world})"
        if step < self.step:
            raise ValueError(f"{asked} was asked for, but {self.step} steps are complete")
        if not 0 <= rank < world:
            raise ValueError(f"{asked}: the rank must be at least 0 and less than the world size")
        self.was_asked = True
        if step not in self._assignments:
            self._assignments[step] = asyncio.create_task(self._assign(step, world))
        task = self._assignments[step]
        await self.wait_or_resync(task, resyncs)
        try:
            # Shielded: all ranks await the task, so a rank that goes away must not cancel it.
            batch = await asyncio.shield(task)
        except (ValueError, RuntimeError):
            self._assignments.pop(step, None)  # the next request tries again
            raise
        if (ranks := len(batch.shards)) != world:
            raise ValueError(f"{asked}, but that batch was assigned to {ranks} ranks already")
        return batch.info, batch.shards[rank].to_frames()

    async def wait_or_resync(self, task: asyncio.Future[Any], resyncs: int) -> None:
        """Wait until `task` is done. Raises Resync for a rank that has had `resyncs`, too few."""
        while resyncs >= self._resyncs and not task.done():
            requested = asyncio.ensure_future(self._resync_requested.wait())
            await asyncio.wait({task, requested}, return_when=asyncio.FIRST_COMPLETED)
            requested.cancel()
        if resyncs < self._resyncs:
            raise Resync

    async def _assign(self, step: int, world: int) -> BatchAssignment:
        """Wait until the batch of `step` is complete, and assign it to `world` ranks."""
        started = self.clock()
        while step >= self.step:
            changed = self._changed
            if step == self.step:  # a rank may ask before rank 0 has reported the step before
                if batch := self._take(step, world):
                    if self.config.algo.routing_replay:
                        await asyncio.to_thread(batch.join_routes)
                    await asyncio.sleep(0)  # others may run before the batch is described
                    batch.info = self._info(batch, step, started)
                    if not isinstance(self.queue, ReplayBuffer):
                        await self.store.submit(Store.assign, batch.group_ids, step)
                    return batch
                await self.request_resync()
            await changed.wait()
        raise ValueError(f"{self.step} steps are complete, but step {step} never got its batch")

    def _take(self, step: int, world: int) -> BatchAssignment | None:
        """Take a batch; None while there are too few groups.

        A resumed run may have a whole batch while no server is ready. It is not taken then if an
        evaluation needs a server before the next push: with `server.deterministic`, and at step 0
        after a restart. A batch that an earlier controller has assigned stays as it is.
        """
        if self._inherited:
            inherited = self.queue.deal(self._inherited, step, world)
            self._inherited = []
            return inherited
        starts_over = step == 0 and bool(self.fleet.taken_over)
        if (starts_over or self.config.server.deterministic) and not self.fleet.router.ready:
            return None
        count = self.config.trainer.batch_groups
        if len(self.queue) < count:
            return None  # before the scan of what runs: this is called for each delivered group
        oldest = min(self.dispatcher.running, default=None)
        if self._held_since is None and self.queue.held_back(count, oldest):
            self._held_since = self.clock()
        return self.queue.take(count, step, world, oldest)

    async def request_resync(self) -> None:
        """Let the trainer, which is waiting anyway, push its weights to the stale servers."""
        if self.fleet.router.stale and not self._resyncing:
            self._resyncing = True
            await self.store.submit(Store.set_totals, {RESYNCS: self._resyncs + 1})
            self._resyncs += 1
            self._resync_requested.set()
            self._resync_requested = asyncio.Event()

    def _info(self, batch: BatchAssignment, step: int, started: float) -> dict[str, Any]:
        now, held_since = self.clock(), self._held_since
        self._held_since = None
        buffer = self.config.buffer
        bound = None if buffer.replay.capacity else buffer.max_staleness
        groups, queue = batch.groups, self.queue
        names = [source.name for source in self.dispatcher.sampler.sources]
        replay = {}
        if isinstance(queue, ReplayBuffer):
            # All episodes of a prompt in the buffer differ.
            correct = [sum(episode_reward(e) > 0 for e in episodes) for episodes in queue]
            replay = {
                "replay_prompts": len(queue),
                "replay_trajectories": queue.num_trajectories,
                "replay_distinct_correct": sum(correct) / max(len(correct), 1),
            }
        return {
            **batch_stats(groups, step, bound),
            **source_stats(groups, names),
            **diversity(group.episodes for group in groups),
            **replay,
            "masked_tokens": batch.masked_tokens,
            "passed_groups": batch.passed,
            "queue_depth": len(queue),
            **self.dispatcher.facts(),
            **judge_facts(self.dispatcher.sources),
            "straggler_wait_s": 0.0 if held_since is None else now - held_since,
            "wait_s": now - started,
            "loop_lag_p99_s": self.lag.take_p99(),
            "store_mib": self.store_mib,
        }


# What is also reported of each data source.
_BY_SOURCE = ("groups", "reward_mean", "uniform_groups_share", "length_mean", "trajectories")


def batch_stats(
    groups: Sequence[Group], version: int, max_staleness: int | None
) -> dict[str, float]:
    """Describe a batch as a trainer at `version` sees it.

    * `staleness_*`: versions, over the sampled tokens that are not overdue and so are trained on
      (all of them without a bound).
    * `length_*`: sampled tokens of a trajectory.
    * `*_share`: shares of trajectories, except `uniform_groups_share`, the share of groups whose
      rewards are all equal: such a group has no advantage to learn from.
    * `reward_*`: over episodes. `traces_mean`: trajectories of an episode.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
    starts = np.concatenate(([0], np.cumsum([len(t.tokens) for t in trajectories])))[:-1]
    versions = np.concatenate([t.versions for t in trajectories])
    sampled = versions >= 0
    # No sequence starts with a sampled token, so a segment never continues the previous sequence.
    begins_segment = sampled & (versions != np.concatenate(([-1], versions[:-1])))
    oldest = np.minimum.reduceat(np.where(sampled, versions, np.iinfo(np.int32).max), starts)
    interrupted = np.maximum.reduceat(versions, starts) > oldest
    staleness = version - versions[sampled]
    trained = staleness if max_staleness is None else staleness[staleness <= max_staleness]
    # Log-probs are 0 where nothing was sampled.
    logprobs = np.concatenate([t.behavior_logprobs for t in trajectories])
    lengths = np.add.reduceat(sampled, starts, dtype=np.int64)
    uniform = [len({t.reward for t in group.trajectories}) == 1 for group in groups]
    truncated = [t.finish_reason == FinishReason.LENGTH for t in trajectories]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "uniform_groups_share": float(np.mean(uniform)),
        "staleness_mean": float(trained.mean()) if len(trained) else 0.0,
        "staleness_max": int(trained.max(initial=0)),
        "interrupted_share": float(np.mean(interrupted)),
        "segments_mean": float(np.count_nonzero(begins_segment) / len(trajectories)),
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated_share": float(np.mean(truncated)),
        "trajectories": len(trajectories),
        "traces_mean": len(trajectories) / len(rewards),
        "tokens": int(lengths.sum()),
        "nonfinite_tokens": int(np.count_nonzero(~np.isfinite(logprobs))),
    }


def source_stats(groups: Sequence[Group], sources: Sequence[str]) -> dict[str, float]:
    """Describe the groups of each named data source that has any, as `key/NAME`."""
    stats: dict[str, float] = {}
    for name in filter(None, sources):
        if own := [group for group in groups if group.prompt_id.startswith(f"{name}/")]:
            facts = {"groups": len(own), **batch_stats(own, 0, None)}
            stats |= {of_source(key, name): facts[key] for key in _BY_SOURCE}
    return stats


def diversity(prompts: Iterable[Sequence[Sequence[Trajectory]]]) -> dict[str, float]:
    """Return `distinct_share` and `distinct_correct`, means over prompts; 0 without prompts.

    They are the share of different completions among the episodes of a prompt, and the number of
    different ones with a positive reward. The traces of an episode are one completion.
    """
    shares: list[float] = []
    correct: list[int] = []
    for episodes in prompts:
        completions = {
            tuple(t.tokens.tobytes() for t in traces): episode_reward(traces) > 0
            for traces in episodes
        }
        shares.append(len(completions) / len(episodes))
        correct.append(sum(completions.values()))
    return {
        "distinct_share": float(np.mean(shares or 0)),
        "distinct_correct": float(np.mean(correct or 0)),
    }
