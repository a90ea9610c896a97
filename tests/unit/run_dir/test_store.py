"""The trajectory store: groups move only along their path, and nothing is half-written."""

import asyncio
import contextlib
import gc
import subprocess
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest

from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store import Store, StoreThread
from areal_lite.run_dir.store_format import StoreError, to_rows
from areal_lite.tools.stored_run import StoredBatches
from areal_lite.trajectory import Group, GroupState, Trajectory


def trajectory(group_id: int, sample_index: int, sampled: int = 3) -> Trajectory:
    versions = np.array([-1, -1, *[4] * (sampled - 1), 5], np.int32)
    logprobs = np.array([0, 0, *[-0.5] * (sampled - 1), np.nan], np.float32)
    mask = np.array([False] * 2 + [True] * sampled)
    tokens = np.arange(2 + sampled, dtype=np.int32)
    return Trajectory(
        group_id=group_id,
        prompt_id=f"p{group_id}",
        sample_index=sample_index,
        tokens=tokens,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        versions=versions,
        finish_reason="stop",
        reward=0.5,
        turn_rewards=[0.25] if sample_index % 2 else None,
        started_at=10.0,
        finished_at=11.0,
        server="server-1",
        requests=2,
    )


def group(group_id: int, members: int = 2) -> Group:
    return Group(
        group_id=group_id,
        prompt_id=f"p{group_id}",
        size=members,
        trajectories=[trajectory(group_id, m) for m in range(members)],
    )


def finish(store: Store, group_id: int) -> None:
    store.admit(group_id, f"p{group_id}", 7, 1, 2, 9.0)
    store.finish(group(group_id), [("q", "a"), (None, None)], None, 12.0)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "t.sqlite")
    yield store
    store.close()


def test_what_was_written_is_read_back(store: Store, tmp_path) -> None:
    finish(store, 3)
    reader = RunReader(tmp_path / "t.sqlite")
    first, second = reader.trajectories()
    written = trajectory(3, 0)
    for name, array in (
        ("tokens", written.tokens),
        ("logprobs", written.behavior_logprobs),
        ("versions", written.versions),
    ):
        np.testing.assert_array_equal(first[name], array)
    expected = dict(
        group_id=3,
        sample_index=0,
        trace_index=0,
        reward=0.5,
        finish_reason="stop",
        n_prompt=2,
        n_tokens=5,
        min_version=4,
        max_version=5,
        num_segments=2,
        requests=2,
        started_at=10.0,
        finished_at=11.0,
        server="server-1",
        segments=[(4, 2, 4), (5, 4, 5)],
        prompt="q",
        completion="a",
        state="finished",
        step=None,
        prompt_id="p3",
    )
    assert {name: first[name] for name in expected} == expected
    assert (second["sample_index"], second["prompt"]) == (1, None)
    written_rows = [(trajectory(3, 0), "q", "a"), (trajectory(3, 1), None, None)]
    (row,) = reader.groups()
    del row["checksum"]
    assert row == dict(
        group_id=3,
        prompt_id="p3",
        prompt_index=7,
        drawn=1,
        state="finished",
        reason=None,
        size=2,
        num_trajectories=2,
        kept_bytes=sum(to_rows(*row).num_bytes for row in written_rows),
        admitted_at=9.0,
        finished_at=12.0,
        step=None,
    )
    assert not list(reader.trajectories(state="used"))
    with pytest.raises(ValueError, match="t.sqlite: attempt to write a readonly database"):
        reader._execute("DELETE FROM groups")
    reader.close()


def test_the_traces_of_an_episode(store: Store) -> None:
    """Each has rows of its own, and the episode counts once."""
    whole = group(2, members=3)
    whole.trajectories = [
        replace(trajectory(2, 0, 2), reward=1.0),
        replace(trajectory(2, 0, 5), trace_index=1, reward=0.5),
        replace(trajectory(2, 0, 4), trace_index=2, reward=0.0),
        trajectory(2, 2),  # sample 1 has failed
    ]
    store.admit(2, "p2", 7, 1, 3, 9.0)
    store.finish(whole, [(f"q{i}", f"a{i}") for i in range(4)], "1 rollouts failed: why", 12.0)
    (read,) = store.waiting_groups()
    assert [t.name for t in read.trajectories] == ["2/0", "2/0.1", "2/0.2", "2/2"]
    assert [len(traces) for traces in read.episodes] == [3, 1] and read.rewards == [0.5, 0.5]
    for one, other in zip(read.trajectories, whole.trajectories, strict=True):
        for name in ("tokens", "behavior_logprobs", "versions", "loss_mask"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert (one.reward, one.trace_index) == (other.reward, other.trace_index)
    assert [row["completion"] for row in store.trajectories()] == ["a0", "a1", "a2", "a3"]
    assert list(store.rewards()) == [(7, [0.5, 0.5], 1)]
    assert store.failures()["failed_rollouts"] == 1 and store.missing_trajectories() == 0
    store.use([2], 0, draws=[[(2, 2), (2, 0)]])
    ((second, first),) = StoredBatches(store._path).drawn(0)
    assert [t.name for t in [*second, *first]] == ["2/2", "2/0", "2/0.1", "2/0.2"]
    store._db.execute("UPDATE trajectories SET trace_index = 9 WHERE trace_index = 1")
    with pytest.raises(ValueError, match="trajectory 2/0.9 is damaged"):
        StoredBatches(store._path).used_groups(0)


def test_states(store: Store) -> None:
    for group_id in range(4):
        finish(store, group_id)
    store.admit(4, "p4", 0, 1, 2, 0.0)
    store.admit(5, "p5", 0, 1, 2, 0.0)
    store.use([0, 1], step=6)
    store.drop(2, "overdue", 13.0)
    store.finish(group(4), [(None, None)] * 2, "all right", 13.0, "filtered")
    assert len(list(store.trajectories(state="filtered"))) == 2  # what it cost is kept
    assert store.counts() == {"in_flight": 1, "finished": 1, "used": 2, "filtered": 1, "dropped": 1}
    assert [t["step"] for t in store.groups()] == [6, 6, None, None, None, None]
    assert [t["reason"] for t in store.groups()] == [
        None,
        None,
        "overdue",
        None,
        "all right",
        None,
    ]
    assert store.missing_trajectories() == 0
    store._db.execute("DELETE FROM trajectories WHERE group_id = 1 AND sample_index = 0")
    assert store.missing_trajectories() == 1


def test_a_group_cannot_be_used_twice_or_unfinished(store: Store) -> None:
    finish(store, 0)
    store.use([0], step=1)
    store.admit(1, "p1", 0, 1, 2, 0.0)
    finish(store, 3)
    for group_id in (0, 1, 2):
        with pytest.raises(RuntimeError, match="of the 2 groups of step 2 only 1 are finished"):
            store.begin()
            store.use([3, group_id], step=2)
        store.rollback()
    assert [(t["state"], t["step"]) for t in store.groups()] == [
        ("used", 1),
        ("in_flight", None),
        ("finished", None),
    ]
    with pytest.raises(RuntimeError, match="group 0 was to become dropped"):
        store.drop(0, "why", 0.0)
    with pytest.raises(ValueError, match="UNIQUE constraint failed"):
        store.admit(0, "p0", 0, 1, 2, 0.0)


def test_no_file_to_read(tmp_path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        RunReader(tmp_path / "none.sqlite")


def test_the_thread_commits_in_order_and_many_at_once(tmp_path) -> None:
    commits = 0

    class Counting(Store):
        def commit(self) -> None:
            nonlocal commits
            super().commit()
            commits += 1

    async def run() -> dict[str, int]:
        thread = StoreThread(Counting(tmp_path / "t.sqlite"))
        futures = []
        for i in range(200):
            futures.append(thread.submit(Store.admit, i, f"p{i}", i, i + 1, 2, 0.0))
            futures.append(thread.submit(Store.finish, group(i), [(None, None)] * 2, None, 1.0))
        futures.append(thread.submit(Store.use, list(range(50)), 0))
        await asyncio.gather(*futures)
        counts = await thread.submit(Store.counts)
        await thread.close()
        return counts

    assert asyncio.run(run()) == dict.fromkeys(GroupState, 0) | {"finished": 150, "used": 50}
    assert commits < 200
    assert RunReader(tmp_path / "t.sqlite").counts()["used"] == 50


def test_the_thread_keeps_no_group(tmp_path) -> None:
    """No reference, and no cycle, which would wait for the garbage collector."""

    async def run() -> None:
        thread = StoreThread(Store(tmp_path / "t.sqlite"))
        groups = [group(i) for i in range(20)]
        kept = [weakref.ref(one.trajectories[0].tokens) for one in groups]
        await asyncio.gather(
            *(thread.submit(Store.admit, i, f"p{i}", i, i + 1, 2, 0.0) for i in range(20)),
            *(thread.submit(Store.finish, one, [(None, None)] * 2, None, 1.0) for one in groups),
        )
        del groups
        await thread.close()
        assert all(reference() is None for reference in kept)

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_the_commit_of_a_durable_call_is_durable(tmp_path) -> None:
    levels: list[int] = []

    class Watched(Store):
        def commit(self) -> None:
            levels.extend(self._db.execute("PRAGMA synchronous").fetchone())
            super().commit()

    async def run() -> None:
        thread = StoreThread(Watched(tmp_path / "t.sqlite"))
        await thread.submit(Store.admit, 0, "p0", 0, 1, 2, 0.0)
        await thread.submit(Store.admit, 1, "p1", 1, 2, 2, 0.0, durable=True)
        await thread.submit(Store.admit, 2, "p2", 2, 3, 2, 0.0)
        await thread.close()

    asyncio.run(run())
    normal, full = 1, 2
    assert levels[:3] == [normal, full, normal]


def test_the_thread_raises_errors_to_the_caller_and_undoes_the_commit(tmp_path) -> None:
    async def run() -> None:
        thread = StoreThread(Store(tmp_path / "t.sqlite"))
        await thread.submit(Store.admit, 0, "p0", 0, 1, 2, 0.0)
        with pytest.raises(RuntimeError, match="group 5"):
            await thread.submit(Store.finish, group(5), [(None, None)] * 2, None, 1.0)
        await thread.submit(Store.admit, 1, "p1", 0, 1, 2, 0.0)
        assert await thread.submit(
            lambda store: store._db.execute("SELECT count(*) FROM trajectories").fetchone()
        ) == (0,)
        assert (await thread.submit(Store.counts))["in_flight"] == 2
        await thread.close()

    asyncio.run(run())


def test_what_was_committed_survives_the_death_of_the_process(tmp_path) -> None:
    code = """
import asyncio, os, sys
from pathlib import Path
from areal_lite.run_dir.store import Store
from areal_lite.run_dir.store_format import StoreError
from areal_lite.run_dir.store import StoreThread
async def main():
    thread = StoreThread(Store(Path(sys.argv[1])))
    for i in range(20):
        await thread.submit(Store.admit, i, "p", i, i + 1, 2, 0.0)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "t.sqlite")]).returncode == -9
    assert Store(tmp_path / "t.sqlite").counts()["in_flight"] == 20


def test_counts_of_the_whole_run(store: Store) -> None:
    for group_id in range(5):
        store.admit(group_id, f"p{group_id}", group_id, group_id + 1, 3, 0.0)
    for group_id in range(3):
        store.finish(group(group_id), [(None, None)] * 2, "1 rollouts failed: why", 1.0)
    store.drop(3, "empty: why", 2.0)
    store.drop(4, "resume: was in flight", 2.0)
    assert store.failures() == {"empty_groups": 1, "failed_rollouts": 6}
    store.set_totals({"aborts": 4, "drained": 1})
    store.set_totals({"aborts": 9})
    assert store.totals() == {"aborts": 9, "drained": 1}


def test_an_empty_store_has_no_counts(store: Store) -> None:
    assert store.failures() == {"empty_groups": 0, "failed_rollouts": 0}
    assert store.totals() == {}


def test_a_full_disk_names_its_remedy_and_loses_nothing(tmp_path) -> None:
    path = tmp_path / "t.sqlite"

    async def test() -> None:
        store = Store(path)
        store._execute(f"PRAGMA max_page_count = {store._pragma('page_count') + 2}")
        thread = StoreThread(store)
        await thread.submit(Store.admit, 0, "p", 0, 1, 2, 0.0)
        with pytest.raises(StoreError, match="disk is full: make room .* resume=auto"):
            for number in range(1, 1000):
                await thread.submit(Store.admit, number, "p" * 100, number, number + 1, 2, 0.0)
        store._execute("PRAGMA max_page_count = 100000")
        await thread.submit(Store.drop, 0, "it goes on when there is room", 1.0)
        await thread.close()

    asyncio.run(test())
    with contextlib.closing(RunReader(path)) as store:
        assert [row["state"] for row in store.groups()][:2] == ["dropped", "in_flight"]


def test_a_read_only_disk_names_its_remedy(store: Store) -> None:
    store._execute("PRAGMA query_only = 1")
    with pytest.raises(StoreError, match="make it writable, then continue with resume=auto"):
        store.admit(0, "p", 0, 1, 2, 0.0)


def test_a_store_thread_survives_an_error_of_its_rollback(tmp_path, monkeypatch) -> None:
    async def test() -> None:
        thread = StoreThread(Store(tmp_path / "t.sqlite"))

        def broken(store) -> None:
            raise StoreError("disk is full")

        monkeypatch.setattr(Store, "rollback", broken)
        for _ in range(2):
            with pytest.raises(StoreError):
                await asyncio.wait_for(thread.submit(broken), 5)
        await thread.close()

    asyncio.run(test())


@pytest.mark.parametrize("name", ["a?mode=rw", "a#b", "a%20b", "a b", "ä", "a\udce9"])
def test_a_folder_of_any_name_can_be_read(tmp_path, name):
    (tmp_path / name).mkdir()
    path = tmp_path / name / "t.sqlite"
    with contextlib.closing(Store(path)) as store:
        finish(store, 3)
    with contextlib.closing(RunReader(path)) as reader:
        assert reader.counts()["finished"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
