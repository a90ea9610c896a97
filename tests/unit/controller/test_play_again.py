"""A synchronous run with `server.deterministic`: killed anywhere and resumed = never killed.

Controller and store are real. Tokens and weights are hashes: the tokens of a rollout depend on the
weights, the group and the sample, and the weights on all batches before, in their order.
"""

import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_lite.config import TrainConfig
from areal_lite.controller.batches import Batches
from areal_lite.controller.buffer import GroupQueue
from areal_lite.controller.dispatcher import Dispatcher
from areal_lite.controller.protocol import Resync
from areal_lite.controller.sources import Dependencies
from areal_lite.data.prompts import Prompt
from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store import Store, StoreThread
from areal_lite.servers.fleet import request_seed
from areal_lite.trajectory import Group, Trajectory
from tests.unit.controller.one_source import one_source
from tests.unit.controller.test_batches import RecordedStore
from tests.unit.controller.test_dispatcher import FakeFleet
from tests.unit.controller.test_recover import group, new_store

STEPS, BATCH, SIZE = 6, 3, 2


class Prompts:
    num_prompts = 7

    def __getitem__(self, index: int):
        return Prompt(prompt_id=f"p{index}", text="?", answer="!", tokens=[1])


class Rewards:
    """A third of the groups gets equal rewards and is filtered."""

    async def score(self, completion: str, answer: str, info: dict) -> float:
        return float(int(completion) % 2)


class World:
    """A run that can be killed. `weights` are those of each version that was trained.

    Args:
        path: of the store.
        rng: decides how long things take.
    """

    def __init__(self, path: Path, rng: random.Random, deterministic: bool = True):
        self.path, self.rng = path, rng
        self.weights = {0: 17}
        config = TrainConfig(model="m", run_dir="r")
        config.rollout.group_size = SIZE
        config.rollout.max_concurrent = 2 * SIZE
        config.rollout.filters = ["zero_variance"]
        config.trainer.batch_groups, config.trainer.steps = BATCH, STEPS
        config.buffer.max_staleness = 0
        config.server.deterministic = deterministic
        self.config = config

    async def play(self, episode) -> Trajectory:
        version = self.dispatcher.admission.version
        await asyncio.sleep(self.rng.random() / 500)
        name = f"{episode.group_id}-{episode.sample_index}"
        token = request_seed(self.weights[version], name) % 1000
        return Trajectory(
            group_id=episode.group_id,
            prompt_id=episode.prompt.prompt_id,
            sample_index=episode.sample_index,
            tokens=np.array([1, token], np.int32),
            loss_mask=np.array([False, True]),
            behavior_logprobs=np.array([0, -1], np.float32),
            versions=np.array([-1, version], np.int32),
            finish_reason="stop",
        )

    async def train(self, start: int, kill_after_s: float | None) -> bool:
        """Train from the checkpoint `start`; return False if it was killed before the end."""
        store, queue = Store(self.path), GroupQueue(0)
        arrived = asyncio.Event()

        def deliver(group: Group) -> None:
            queue.put(group)
            arrived.set()

        thread = StoreThread(store)
        tokenizer = SimpleNamespace(
            eos_ids=(1,), vocab_size=2000, decode=lambda tokens: str(tokens[-1])
        )
        self.dispatcher = Dispatcher(
            self.config,
            Dependencies(
                sources=one_source(self.config, Prompts(), Rewards()),
                tokenizer=tokenizer,
                store=thread,
                clock=lambda: 0.0,
                workflow=self.play,
            ),
            FakeFleet(),
            deliver,
        )
        self.dispatcher.recover(store, start, start)
        for waiting in store.waiting_groups():
            queue.put(waiting)
        tasks = [
            asyncio.create_task(self.dispatcher.run()),
            asyncio.create_task(self._steps(start, queue, arrived, thread)),
        ]
        await asyncio.wait(tasks, timeout=kill_after_s, return_when=asyncio.FIRST_COMPLETED)
        ended = tasks[1].done()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await thread.close()
        return ended and not tasks[1].result()

    async def _steps(
        self, start: int, queue: GroupQueue, arrived: asyncio.Event, thread: StoreThread
    ) -> None:
        for step in range(start, STEPS):
            while (batch := queue.take(BATCH, step, 1)) is None:
                arrived.clear()
                await arrived.wait()
            tokens = [t.tokens.tolist() for g in batch.groups for t in g.trajectories]
            await asyncio.sleep(self.rng.random() / 500)
            self.weights[step + 1] = request_seed(self.weights[step], str(tokens))
            self.dispatcher.on_version(step + 1)
            await thread.submit(Store.use, batch.group_ids, step)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of both tables as they are; the clock stands still."""
        store = RunReader(self.path)
        rows = [*store.groups(), *store.trajectories()]
        store.close()
        return [{key: str(value) for key, value in row.items()} for row in rows]


def killed_run(path: Path, seed: int, deterministic: bool = True) -> tuple[World, int]:
    """Run to the end with a checkpoint every second step; return how often it was killed."""
    rng = random.Random(seed)
    world = World(path, rng, deterministic)
    kills = 0
    while True:
        saved = max(v for v in world.weights if v % 2 == 0 and (v < STEPS or not kills))
        saved = min(saved, STEPS - 2)
        world.weights = {v: w for v, w in world.weights.items() if v <= saved}
        if asyncio.run(world.train(saved, rng.random() / 30 if kills < 5 else None)):
            return world, kills
        kills += 1


@pytest.fixture(name="unkilled")
def _unkilled(tmp_path) -> World:
    world = World(tmp_path / "unkilled.sqlite", random.Random(0))
    assert asyncio.run(world.train(0, None))
    assert any(row.get("state") == "filtered" for row in world.rows())
    return world


def test_killed_anywhere_and_resumed_is_never_killed(unkilled: World, tmp_path) -> None:
    total = 0
    for seed in range(12):
        world, kills = killed_run(tmp_path / f"{seed}.sqlite", seed)
        total += kills
        assert world.weights[STEPS] == unkilled.weights[STEPS], seed
        assert world.rows() == unkilled.rows(), seed
    assert total >= 20


def test_without_the_setting_a_killed_run_becomes_another(unkilled: World, tmp_path) -> None:
    same = []
    for seed in range(4):
        world, kills = killed_run(tmp_path / f"{seed}.sqlite", seed, False)
        same.append(not kills or world.weights[STEPS] == unkilled.weights[STEPS])
    assert not all(same)


def test_lost_groups_are_as_before_their_first_request() -> None:
    """Group 0 is used before the checkpoint at version 2, group 1 waits, the others are lost."""
    store = new_store()
    for group_id in range(6):
        store.admit(group_id, f"p{group_id}", group_id, group_id + 1, 1, 5.0)
        if group_id == 1:
            admitted = next(row for row in store.groups() if row["group_id"] == 1)
    for group_id, version in enumerate([1, 2, 3, 3]):
        state = "filtered" if group_id == 3 else "finished"
        store.finish(group(group_id, version), [(None, None)], "why", 6.0, state)
    store.drop(5, "empty", 7.0)
    store.use([0], 1)
    store.use([2], 3)
    recovered = store.recover(2, 8.0, play_again=True)
    assert recovered.again == [(2, 2, 3), (3, 3, 4), (4, 4, 5)]
    assert recovered.put_back == [5]
    assert (store.counts()["finished"], store.filtered()) == (1, Counter())
    rows = {row["group_id"]: row for row in store.groups()}
    assert [row["state"] for row in rows.values()] == [
        "used",
        "finished",
        *["in_flight"] * 3,
        "dropped",
    ]
    own = ("group_id", "prompt_id", "prompt_index", "drawn", "checksum")
    for group_id in (2, 3, 4):
        assert {k: v for k, v in rows[group_id].items() if k not in own} == {
            k: v for k, v in admitted.items() if k not in own
        }
    assert [t["group_id"] for t in store.trajectories()] == [0, 1]
    assert store.recover(2, 9.0, play_again=True).again == recovered.again, "killed at once"
    store.close()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_has_a_server_before_it_trains_on_a_waiting_batch(
    deterministic: bool,
) -> None:
    """Its trainer waits for an evaluation before the next push, and nothing else would push."""

    async def run() -> None:
        config = TrainConfig(model="m", run_dir="r")
        config.trainer.batch_groups = 2
        config.server.deterministic = deterministic
        router = SimpleNamespace(ready=set(), stale=["s0"])
        dispatcher = SimpleNamespace(running=set())
        fleet = SimpleNamespace(router=router, taken_over=set())
        batches = Batches(config, dispatcher, fleet, RecordedStore(), lambda: 0.0)
        for group_id in range(2):
            batches.put(group(group_id, 0))
        if deterministic:
            with pytest.raises(Resync):
                await asyncio.wait_for(batches.pull(step=0, rank=0, world=1), 5)
            router.ready = {"s0"}
        assignment = batches._take(0, 1)
        assert assignment and assignment.group_ids == [0, 1]

    asyncio.run(run())
