"""The bound of the store: what is removed, what never is, and how large the file is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_lite.run_dir import store as store_bound
from areal_lite.run_dir.paths import CHECKPOINT_MARKER, CHECKPOINTS_DIR
from areal_lite.run_dir.resume import needed_since
from areal_lite.run_dir.store import Store
from areal_lite.tools.stored_run import StoredBatches
from areal_lite.trajectory import Group, GroupState, Trajectory

LENGTH = 400
MIB = 2**20


def group(group_id: int, length: int = LENGTH, version: int = 0) -> Group:
    """Return a group of two trajectories of random tokens and log-probs."""
    rng = np.random.default_rng(group_id)
    versions = np.full(length, version, np.int32)
    versions[0] = -1
    both = [
        Trajectory(
            group_id=group_id,
            prompt_id=f"p{group_id}",
            sample_index=index,
            tokens=rng.integers(0, 150_000, length).astype(np.int32),
            loss_mask=versions >= 0,
            behavior_logprobs=np.where(versions >= 0, -rng.random(length), 0).astype(np.float32),
            versions=versions,
            finish_reason="stop",
            reward=0.5,
        )
        for index in range(2)
    ]
    return Group(group_id=group_id, prompt_id=f"p{group_id}", size=2, trajectories=both)


def add(store: Store, one: Group, step: int | None = None) -> None:
    number = one.group_id
    store.admit(number, one.prompt_id, number, number + 1, 2, 0.0)
    store.finish(one, [("prompt", "completion")] * 2, None, 100.0 + number)
    if step is not None:
        store.use([number], step)


def trim(store: Store, max_bytes: int, since: int, held: list[int] | None = None) -> int:
    """Trim until nothing more can be done, each call in a transaction; return the calls."""
    calls, more = 0, True
    while more:
        store.begin()
        more = store.trim(max_bytes, since, held)
        store.commit()
        calls += 1
    return calls


def with_tokens(store: Store) -> list[int]:
    return [row["group_id"] for row in store.groups() if row["kept_bytes"]]


def file_bytes(store: Store) -> int:
    """Return the size of the file, after the write-ahead log has been moved into it."""
    store._execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return store._path.stat().st_size


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "t.sqlite")
    yield store
    store.close()


def test_what_a_resume_needs_is_never_removed(store: Store) -> None:
    for number in range(6):
        add(store, group(number), step=number)
    add(store, group(6))
    add(store, group(7))
    store.drop(7, "overdue", 200.0)
    store.admit(8, "p8", 8, 9, 2, 0.0)
    trim(store, 1, since=4)
    assert with_tokens(store) == [4, 5, 6]
    assert [g.group_id for g in store.waiting_groups()] == [6]
    stored = StoredBatches(store._path)
    assert [g.group_id for g in stored.used_groups(4)] == [4]
    with pytest.raises(ValueError, match=r"group 3: tokens not kept \(store.max_gib\)"):
        stored.used_groups(3)
    assert [g.group_id for g, _ in store.finished_groups()] == [4, 5, 6]
    assert [stored.last_step_without_tokens(steps) for steps in (9, 2)] == [3, 1]
    assert store.missing_trajectories() == 0


def test_a_group_that_waits_without_tokens_is_damage(store: Store) -> None:
    add(store, group(0))
    store._execute("UPDATE groups SET kept_bytes = 0")
    with pytest.raises(ValueError, match="group 0: tokens not kept .*it waits: restore the file"):
        store.waiting_groups()


def test_the_oldest_go_first_and_no_more_than_necessary(store: Store) -> None:
    for number in (3, 0, 2, 1):  # in the order of admission; the end decides
        add(store, group(number), step=0)
    before = file_bytes(store)
    size = before - LENGTH
    trim(store, size, since=9)
    assert with_tokens(store) in ([3], [2, 3])
    assert file_bytes(store) <= size
    assert trim(store, before, since=9) == 1


def test_what_was_learned_from_and_what_failed_stays_longest(store: Store) -> None:
    """Filtered and stale groups go first, the oldest first; then the oldest of the others."""
    for number in range(8):
        one = group(number)
        if number == 2:
            del one.trajectories[1]  # a rollout failed
        store.admit(number, one.prompt_id, number, number + 1, 2, 0.0)
        filtered = GroupState.FILTERED if number in (1, 2, 5) else GroupState.FINISHED
        texts = [("prompt", "completion")] * len(one.trajectories)
        store.finish(one, texts, None, 100.0 + number, filtered)
    store.use([0, 4, 6], 0)
    store.drop(3, "overdue", 200.0)
    order, kept = [], with_tokens(store)
    while kept:
        store._remove(1, since=1, held=None)
        left = with_tokens(store)
        if left == kept:
            break
        order += sorted(set(kept) - set(left))
        kept = left
    assert order == [1, 5, 3, 0, 2, 4, 6] and kept == [7], "7 waits"


def test_with_replay_the_groups_of_the_buffer_stay(store: Store) -> None:
    for number in range(6):
        add(store, group(number), step=0 if number < 3 else None)
    store.use([], 0, [[(0, 0), (1, 1)]])
    trim(store, 1, since=1, held=[1, 5])
    assert with_tokens(store) == [1, 5]
    with pytest.raises(ValueError, match="group 0: tokens not kept"):
        StoredBatches(store._path).drawn(0)
    assert StoredBatches(store._path).last_step_without_tokens(1) == 0
    store.recover(1, 300.0)
    assert store.counts()["finished"] == 3, "groups outside of the buffer are no damage"


def test_all_other_columns_stay(store: Store) -> None:
    def rows() -> list[dict[str, Any]]:
        loose = ("kept_bytes", "tokens", "logprobs", "versions", "prompt", "completion")
        found = [*store.groups(), *store.trajectories()]
        return [{k: v for k, v in row.items() if k not in loose} for row in found]

    add(store, group(0), step=0)
    before = rows()
    (versions, _) = (row["versions"].tolist() for row in store.trajectories())
    trim(store, 1, since=1)
    assert rows() == before
    first, _ = store.trajectories()
    assert first["versions"].tolist() == versions
    assert (first["tokens"], first["logprobs"], first["prompt"]) == (None, None, None)


def test_the_file_stays_within_its_bound(store: Store) -> None:
    """Pages that become free are used again: much more goes through the store than it holds."""
    bound, written = MIB, 0
    for step in range(60):
        for number in range(8 * step, 8 * step + 8):
            add(store, group(number, 2000), step)
            written += 2 * 2000
        trim(store, bound, since=step - 2)
        assert file_bytes(store) <= bound
    assert written * 4 > 5 * bound
    kept = with_tokens(store)
    assert kept == list(range(kept[0], 8 * 60)), "the newest are kept"
    assert len(kept) > 16


def test_what_must_stay_may_exceed_the_bound(store: Store) -> None:
    for number in range(30):
        add(store, group(number, 2000), step=number)
    trim(store, MIB // 8, since=10)
    assert with_tokens(store) == list(range(10, 30))


def test_a_lower_bound_makes_the_file_smaller(store: Store) -> None:
    for number in range(60):
        add(store, group(number, 2000), step=number)
    assert file_bytes(store) > MIB
    trim(store, MIB // 4, since=59)
    assert file_bytes(store) <= MIB // 4
    assert store._pragma("integrity_check") == "ok"


def test_a_call_removes_a_limited_number_of_bytes(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(store_bound, "_BYTES_AT_ONCE", 64 * 1024)
    for number in range(40):
        add(store, group(number, 2000), step=0)
    before = len(with_tokens(store))
    store.trim(1, 1)
    per_group = next(row["kept_bytes"] for row in store.groups() if row["kept_bytes"])
    assert before - len(with_tokens(store)) == -(-64 * 1024 // per_group)
    assert trim(store, 1, since=1) > 10 and with_tokens(store) == []


def test_a_lost_step_without_tokens_is_done_again(store: Store) -> None:
    """A checkpoint that is older than those for which tokens are kept."""
    for number in range(4):
        add(store, group(number), step=number)
    trim(store, 1, since=2)
    recovered = store.recover(1, 300.0)
    assert (store.counts()["finished"], recovered.put_back) == (2, [1])
    row = list(store.groups())[1]
    assert (row["state"], row["reason"]) == ("dropped", "resume: its tokens are not kept")
    again = store.recover(0, 301.0, play_again=True)
    assert [group_id for group_id, *_ in again.again] == [0]
    assert list(store.groups())[0]["kept_bytes"] is None


def test_its_size(store: Store) -> None:
    add(store, group(0), step=0)
    assert store.mib() == file_bytes(store) / MIB


def test_tokens_are_kept_since_the_checkpoint_before_the_newest(tmp_path: Path) -> None:
    folder = tmp_path / CHECKPOINTS_DIR
    for step, since in ((3, 3), (8, 3), (12, 8)):
        (folder / f"step-{step}").mkdir(parents=True)
        assert needed_since(tmp_path) < since or step == 8
        (folder / f"step-{step}" / CHECKPOINT_MARKER).touch()
        assert needed_since(tmp_path) == since
    assert needed_since(tmp_path / "no run") == 0
