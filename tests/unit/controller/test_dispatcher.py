"""The dispatcher with a fake fleet: every submitted group ends exactly once."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from areal_lite.config import TrainConfig
from areal_lite.controller.dispatcher import Dispatcher
from areal_lite.controller.sources import Dependencies, Player, RemotePrompts
from areal_lite.data.prompts import Prompt
from areal_lite.data.sampler import PromptSampler, SourceOrder
from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store import Store, StoreThread
from areal_lite.servers.client import SamplingParams
from areal_lite.servers.fleet import Completion, Session
from areal_lite.servers.registry import ServerInfo
from areal_lite.trajectory import Group, Trajectory
from areal_lite.workers.pool import TaskFailed
from tests.unit.controller.one_source import one_source

SERVER = ServerInfo(name="s0", url="http://x", api_key=None, tensor_parallel=1, pid=1)
STEPS, BATCH, ETA, SIZE = 6, 3, 2, 2


class FakeFleet:
    """One server that is always ready; counts reservations."""

    def __init__(self) -> None:
        self.load = 0

    async def place(self, samples: int) -> list[ServerInfo]:
        await asyncio.sleep(0)
        self.load += samples
        return [SERVER] * samples

    async def complete(self, *_: object) -> Completion:
        raise AssertionError("the workflows of these tests ask no server")

    def close_session(self, session: Session) -> None:
        self.load -= session.reserved


class FakeWorkflow:
    """Plays no server: after a random time it fails, or makes up to three traces.

    They have a reward each, or none has.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng

    async def __call__(self, episode) -> Trajectory | list[Trajectory]:
        await asyncio.sleep(self.rng.random() / 500)
        if self.rng.random() < 0.4:
            raise ValueError("the tool broke")
        if self.rng.random() < 0.5:
            return self.trace(episode, None)
        rewards = [0.0, 0.0, 1.0] if self.rng.random() < 0.5 else [None, None]
        return [self.trace(episode, reward) for reward in rewards]

    def trace(self, episode, reward: float | None) -> Trajectory:
        return Trajectory(
            reward=reward,
            group_id=episode.group_id,
            prompt_id=episode.prompt.prompt_id,
            sample_index=episode.sample_index,
            tokens=np.arange(3, dtype=np.int32),
            loss_mask=np.array([False, True, True]),
            behavior_logprobs=np.array([0, -1, -1], np.float32),
            versions=np.array([-1, 0, 0], np.int32),
            finish_reason="stop",
        )


class FakeRewards:
    """Scores at random, and sometimes fails."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    async def score(self, completion: str, answer: str, info: dict) -> float:
        if self.rng.random() < 0.2:
            raise TaskFailed("timeout", "too slow")
        return float(self.rng.random() < 0.5)


class Prompts:
    num_prompts = 40

    def __getitem__(self, index: int):
        return Prompt(prompt_id=f"p{index}", text="?", answer="!", tokens=[1])


async def run(path: Path, seed: int) -> RunReader:
    """Train STEPS steps on what the dispatcher delivers, and drop some groups before use."""
    rng = random.Random(seed)
    config = TrainConfig(model="m", run_dir="r")
    config.rollout.group_size = SIZE
    config.rollout.filters = ["zero_variance"]
    config.trainer.batch_groups, config.trainer.steps = BATCH, STEPS
    config.buffer.max_staleness = ETA
    store = Store(path)
    thread = StoreThread(store)
    fleet = FakeFleet()
    delivered: list[Group] = []
    dispatcher = Dispatcher(
        config,
        Dependencies(
            sources=one_source(config, Prompts(), FakeRewards(rng)),
            tokenizer=SimpleNamespace(eos_ids=(1,), vocab_size=98, decode=lambda tokens: "text"),
            store=thread,
            clock=lambda: 0.0,
            workflow=FakeWorkflow(rng),
        ),
        fleet,
        delivered.append,
    )
    gate = dispatcher.admission

    def check() -> None:
        assert dispatcher.counts["groups"] == gate.running + gate.accepted + gate.rejected
        assert len(dispatcher.running) == gate.running
        assert 0 <= dispatcher.in_flight <= gate.running * SIZE
        assert gate.accepted + gate.running <= (ETA + gate.version + 1) * BATCH

    running = asyncio.create_task(dispatcher.run())
    for step in range(STEPS):
        while len(delivered) < BATCH:
            await asyncio.sleep(0.001)
            check()
            assert not running.done(), running.exception()
        batch, delivered[:] = delivered[:BATCH], delivered[BATCH:]
        await thread.submit(Store.use, [group.group_id for group in batch], step)
        dispatcher.on_version(step + 1)
        check()
    running.cancel()
    await asyncio.wait([running])
    counts = await thread.submit(Store.counts)
    assert counts["used"] == STEPS * BATCH == gate.accepted and gate.running == 0
    assert counts["in_flight"] == counts["finished"] == 0, "the last step would use nothing more"
    assert counts["filtered"] == dispatcher.filtered.total() > 0
    assert counts["dropped"] == dispatcher.counts["empty_groups"]
    assert counts["filtered"] + counts["dropped"] == gate.rejected
    assert sum(counts.values()) == dispatcher.counts["groups"]
    assert fleet.load == 0, "a reservation leaked"
    failures = await thread.submit(Store.failures)
    assert failures["failed_rollouts"] == dispatcher.counts["failed_rollouts"] > 0
    await thread.close()
    return RunReader(path)


@pytest.mark.parametrize("seed", range(3))
def test_every_submitted_group_ends_exactly_once(tmp_path, seed: int) -> None:
    store = asyncio.run(run(tmp_path / "store.sqlite", seed))
    groups = {row["group_id"]: row for row in store.groups()}
    assert sorted(groups) == list(range(len(groups)))
    traces = list(store.trajectories())
    kept = Counter(t["group_id"] for t in traces)
    episodes = Counter(group for group, _ in {(t["group_id"], t["sample_index"]) for t in traces})
    assert {1, 2} == set(episodes.values()) and {1, 3} < set(kept.values())
    for group_id, row in groups.items():
        assert row["state"] in ("used", "filtered", "dropped")
        if row["state"] != "dropped":
            assert kept[group_id] == row["num_trajectories"] > 0
        if row["state"] == "used" and episodes[group_id] < SIZE:
            assert "rollouts failed" in row["reason"]
    assert {t["server"] for t in store.trajectories()} == {SERVER.name}
    store.close()


def test_two_evaluations_may_play_the_same_problem_at_a_time() -> None:
    """The second begins while the first, after an earlier push, is not complete."""
    rng = random.Random(0)
    config = TrainConfig(model="m", run_dir="r")
    parts = Dependencies(
        sources=one_source(config, Prompts(), FakeRewards(rng)),
        tokenizer=SimpleNamespace(eos_ids=(1,), vocab_size=98, decode=lambda tokens: "text"),
        store=None,
        clock=lambda: 0.0,
        workflow=FakeWorkflow(rng),
    )
    params = SamplingParams(max_new_tokens=1, temperature=1.0, stop_token_ids=(1,))

    async def evaluate(name: str) -> None:
        player = Player(parts.sources[""], parts, FakeFleet(), Counter(), what="held-out problem")
        for index in range(20):
            await player.play(index, Prompts()[index], [f"{name}-{index}"], params)

    async def both() -> None:
        await asyncio.gather(evaluate("eval-1"), evaluate("eval-2"))

    asyncio.run(both())
    assert not parts.playing


class SlowPrompts:
    """Prompts of worker processes. Those in `slow` do not come."""

    def __init__(self, *slow: int) -> None:
        self.slow = slow

    async def prompt(self, split: str, index: int) -> Prompt:
        if index in self.slow:
            await asyncio.Event().wait()
        return Prompts()[index]


def test_a_run_that_ends_while_a_prompt_is_late_resumes(tmp_path) -> None:
    """The next group's id is the number of rows: a row without those before it would be in the way.

    A prompt without a row is drawn again, and nothing counts as lost.
    """
    config = TrainConfig(model="m", run_dir="r")
    config.rollout.group_size, config.trainer.batch_groups, config.trainer.steps = 1, 4, 2
    config.buffer.max_staleness = 0
    sampler = PromptSampler(SourceOrder(40, config.seed))
    order = [sampler.next() for _ in range(4)]

    async def start(*slow: int) -> tuple[list[int], int, int]:
        """Run until nothing more comes; return the prompts of all rows, their number, `stored`."""
        store = Store(tmp_path / "store.sqlite")
        thread = StoreThread(store)
        (source,) = one_source(config, RemotePrompts(40, 0), FakeRewards(random.Random(0))).values()
        parts = Dependencies(
            sources={"": replace(source, episodes=SlowPrompts(*slow))},
            tokenizer=SimpleNamespace(eos_ids=(1,), vocab_size=98, decode=lambda tokens: "text"),
            store=thread,
            clock=lambda: 0.0,
            workflow=FakeWorkflow(random.Random(0)),
        )
        dispatcher = Dispatcher(config, parts, FakeFleet(), lambda group: None)
        dispatcher.recover(store, 0, 0)
        running = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(0.1)
        assert not running.done(), running.exception()
        running.cancel()
        await asyncio.wait([running])
        await thread.close()
        rows = list(RunReader(tmp_path / "store.sqlite").groups())
        assert [row["group_id"] for row in rows] == list(range(len(rows)))
        return [row["prompt_index"] for row in rows], len(rows), dispatcher.counts["stored"]

    prompts, rows, stored = asyncio.run(start(order[1]))
    assert prompts == order[:1] and rows == stored
    prompts, rows, stored = asyncio.run(start())
    assert set(order) <= set(prompts) and rows == stored
