"""Retention removes tokens after a step, keeps what is needed, and reports the size."""

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_lite.config import ReplayConfig, TrainConfig
from areal_lite.controller.buffer import GroupQueue, ReplayBuffer
from areal_lite.controller.service import Retention
from areal_lite.run_dir.paths import CHECKPOINT_MARKER, CHECKPOINTS_DIR, STORE_FILE
from areal_lite.run_dir.store import Store, StoreThread
from tests.unit.run_dir.test_store_bound import MIB, add, group, with_tokens

LENGTH = 2000


def filled(run_dir: Path, steps: int = 40) -> Store:
    """Return a store with one group a step, and one that waits."""
    store = Store(run_dir / STORE_FILE)
    for number in range(steps):
        add(store, group(number, LENGTH), step=number)
    add(store, group(steps, LENGTH))
    return store


def checkpoint(run_dir: Path, step: int) -> None:
    folder = run_dir / CHECKPOINTS_DIR / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / CHECKPOINT_MARKER).touch()


def retained(run_dir: Path, store: Store, max_gib: float | None, queue=None, running=()) -> dict:
    """Run it after a step until the size is known; return its MiB."""
    config = TrainConfig(model="m", run_dir=str(run_dir))
    config.store.max_gib = max_gib
    batches = SimpleNamespace(queue=queue or GroupQueue(4), store_mib=0.0)
    dispatcher = SimpleNamespace(running=set(running))

    async def run() -> float:
        thread = StoreThread(store)
        retention = Retention(config, thread, dispatcher, batches)
        retention.due.set()
        task = asyncio.create_task(retention.run())
        while not batches.store_mib:
            await asyncio.sleep(0.005)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await thread.submit(lambda _: None)
        return batches.store_mib

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_it_trims_to_the_bound_and_keeps_what_a_resume_needs(tmp_path: Path, caplog) -> None:
    store = filled(tmp_path)
    checkpoint(tmp_path, 36)
    checkpoint(tmp_path, 38)
    size = retained(tmp_path, store, 0.3 / 1024)
    assert size <= 0.3
    kept = with_tokens(store)
    assert kept[-5:] == [36, 37, 38, 39, 40] and 0 not in kept
    assert not caplog.records


def test_it_says_once_what_keeps_the_store_above_its_bound(tmp_path: Path, caplog) -> None:
    store = filled(tmp_path)
    size = retained(tmp_path, store, 0.001 / 1024)
    assert with_tokens(store) == list(range(41)), "without a checkpoint all steps are done again"
    assert size > 0.5
    (record,) = caplog.records
    assert "more than store.max_gib" in record.message and "save checkpoints" in record.message


def test_without_a_bound_it_only_measures(tmp_path: Path) -> None:
    store = filled(tmp_path)
    checkpoint(tmp_path, 39)
    assert retained(tmp_path, store, None) * MIB == pytest.approx(
        store._pragma("page_count") * store._pragma("page_size")
    )
    assert with_tokens(store) == list(range(41))


def test_groups_of_a_replay_buffer_stay_also_before_they_are_in_it(tmp_path: Path) -> None:
    store, replay = filled(tmp_path), ReplayBuffer(ReplayConfig(capacity=4), 2, 1)
    checkpoint(tmp_path, 40)
    for number in (3, 7):
        replay.put(group(number, LENGTH))
    retained(tmp_path, store, 0.001 / 1024, replay, running=[40])
    assert with_tokens(store) == [3, 7, 40]


def test_a_replay_buffer_knows_its_groups(monkeypatch) -> None:
    monkeypatch.setattr("areal_lite.controller.buffer.MAX_PROMPTS", 2)
    replay = ReplayBuffer(ReplayConfig(capacity=3), 2, 1)
    for number in range(5):
        one = group(number)
        one.prompt_id = f"p{number % 3}"
        replay.put(one)
        held = {traces[0].group_id for episodes in replay for traces in episodes}
        assert replay.group_ids == held
    assert len(replay.group_ids) < 5
