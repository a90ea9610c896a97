"""A damaged trajectory store: one line that names the file, or a group that is drawn again."""

import random
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store import Store
from areal_lite.run_dir.store_format import checksum, pack_logprobs, to_rows
from areal_lite.tools.stored_run import StoredBatches
from areal_lite.trajectory import Group, Trajectory

NUM_GROUPS = 12
NUM_WAITING = 5


def trajectory(group_id: int, sample_index: int, version: int = 0) -> Trajectory:
    random_state = np.random.default_rng(100 * group_id + sample_index)
    versions = np.array([-1] * 5 + [version] * 15, np.int32)
    return Trajectory(
        group_id=group_id,
        prompt_id=f"p{group_id}",
        sample_index=sample_index,
        tokens=random_state.integers(0, 50_000, 20).astype(np.int32),
        loss_mask=versions >= 0,
        behavior_logprobs=np.where(versions >= 0, -random_state.random(20), 0).astype(np.float32),
        versions=versions,
        finish_reason="stop",
        reward=-0.0 if sample_index else 1.0,
        finished_at=1,
        routes=random_state.integers(0, 9, (20, 2, 3)).astype(np.uint8),
    )


def fill(store: Store) -> None:
    """Four used groups, five that wait, three in flight."""
    for group_id in range(NUM_GROUPS):
        store.admit(group_id, f"p{group_id}", group_id, group_id + 1, 2, 1)
        if group_id < 9:
            both = [trajectory(group_id, sample_index) for sample_index in range(2)]
            group = Group(group_id=group_id, prompt_id=f"p{group_id}", size=2, trajectories=both)
            store.finish(group, [("p ☃", "c")] * 2, None, 2.0)
        if group_id < 4:
            store.use([group_id], step=0)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("store") / "good.sqlite"
    store = Store(path)
    fill(store)
    store.close()
    return path


def resume(path: Path) -> tuple[int, set[str]]:
    """Resume as a controller does. Returns the waiting groups' number and the drop reasons.

    Everything that waits must be what was stored.
    """
    store = Store(path)
    try:
        store.recover(1, 9.0)
        waiting, counts = store.waiting_groups(), store.counts()
        assert len(waiting) == counts["finished"] and sum(counts.values()) == NUM_GROUPS
        for group in waiting:
            assert group.prompt_index == group.group_id and len(group.trajectories) == 2
            for index, got in enumerate(group.trajectories):
                expected = trajectory(group.group_id, index)
                for name in ("tokens", "behavior_logprobs", "versions", "loss_mask", "routes"):
                    np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
                assert (got.reward, got.finish_reason) == (expected.reward, "stop")
        return len(waiting), {row["reason"] for row in store.groups() if row["reason"]}
    finally:
        store.close()


def damaged(content: bytes, tmp_path: Path) -> str:
    """Resume from a file with this content: return the number of waiting groups, or the error."""
    path = tmp_path / "bad.sqlite"
    for file in tmp_path.glob("bad.sqlite*"):
        file.unlink()
    path.write_bytes(content)
    try:
        return str(resume(path)[0])
    except ValueError as error:
        assert str(path) in str(error) and len(str(error).splitlines()) == 1
        assert "restore the file from a copy" in str(error)
        return "refused"


def test_an_undamaged_store(good, tmp_path):
    shutil.copy(good, tmp_path / "bad.sqlite")
    assert resume(tmp_path / "bad.sqlite") == (NUM_WAITING, {"resume: was in flight"})


def flip_bits(good: Path, tmp_path: Path, count: int) -> set[str]:
    generator, content, outcomes = random.Random(1), good.read_bytes(), set()
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(generator.choice((1, 4, 32))):
            changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
        outcomes.add(damaged(bytes(changed), tmp_path))
    return outcomes


def test_flipped_bits_never_reach_the_trainer(good, tmp_path):
    outcomes = flip_bits(good, tmp_path, 250)
    assert {"refused", str(NUM_WAITING), str(NUM_WAITING - 1)} <= outcomes


@pytest.mark.slow
def test_many_more_flipped_bits(good, tmp_path):
    flip_bits(good, tmp_path, 5000)


def test_a_truncated_store_is_refused_or_loses_groups(good, tmp_path):
    content, generator = good.read_bytes(), random.Random(2)
    cuts = [content[: generator.randrange(len(content) - 1)] for _ in range(40)]
    outcomes = [damaged(cut, tmp_path) for cut in cuts]
    assert outcomes.count("refused") > 30


def foreign() -> bytes:
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE groups (state TEXT)")
    return db.serialize()


@pytest.mark.parametrize("content", [b"", b"hello world" * 100, b"\0" * 8192, foreign()])
@pytest.mark.parametrize("opened", [Store, RunReader])
def test_another_file_is_refused_and_left_alone(content, opened, tmp_path):
    path = tmp_path / "trajectories.sqlite"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="trajectories.sqlite.*(no|not a|damaged)"):
        opened(path)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_in_its_place_is_one_line(tmp_path):
    (tmp_path / "s.sqlite").mkdir()
    with pytest.raises(ValueError, match="s.sqlite: unable to open database file"):
        Store(tmp_path / "s.sqlite")
    with pytest.raises(ValueError, match="cannot be made: unable to open"):
        Store(tmp_path / "missing" / "s.sqlite")


def test_a_damaged_group_that_waits_is_dropped_and_drawn_again(good, tmp_path, caplog):
    shutil.copy(good, path := tmp_path / "s.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE trajectories SET reward = 0.5 WHERE group_id = 5 AND sample_index = 0")
        db.execute("DELETE FROM trajectories WHERE group_id = 6 AND sample_index = 1")
    db.close()
    assert resume(path) == (NUM_WAITING - 2, {"resume: was in flight", "resume: damaged"})
    assert "dropped group 5: " in caplog.text
    assert "s.sqlite: trajectory 5/0 is damaged" in caplog.text
    assert "s.sqlite: group 6 has 1 trajectories, not 2" in caplog.text
    store = Store(path)
    assert {5, 6} < set(store.recover(1, 10.0).put_back)
    store.close()


def test_a_checksum_does_not_replace_the_invariants(good, tmp_path):
    """A row with a right checksum is refused, too, if its versions go backwards."""
    shutil.copy(good, path := tmp_path / "s.sqlite")
    wrong = trajectory(5, 0)
    wrong.versions[-1] = 0
    wrong.versions[5:8] = 3
    store = Store(path)
    replace(store, wrong)
    store.close()
    assert resume(path)[0] == NUM_WAITING - 1


def replace(store: Store, other: Trajectory, **sequence: bytes) -> None:
    """Replace the rows of a trajectory by those of `other`, with some columns of `sequences`.

    The checksums are right.
    """
    rows = to_rows(other, None, None)
    *ids, tokens, logprobs, texts, routes, _ = rows.sequence
    columns = dict(tokens=tokens, logprobs=logprobs, texts=texts, routes=routes) | sequence
    values = (*ids, *columns.values())
    for table, row in (("trajectories", rows.facts), ("sequences", (*values, checksum(values)))):
        store._execute(f"DELETE FROM {table} WHERE group_id = {ids[0]} AND sample_index = 0")
        store._execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


@pytest.mark.parametrize(
    "column",
    [
        pack_logprobs(np.zeros(19, np.float32)),
        pack_logprobs(np.zeros(21, np.float32)),
        pack_logprobs(np.zeros(50_000_000, np.float32)),
        pack_logprobs(np.zeros(20, np.float32))[:-1],
        b"no zlib",
        b"",
    ],
    ids=["short", "long", "bomb", "cut off", "foreign", "empty"],
)
def test_a_column_that_does_not_unfold_to_its_tokens_is_damage(good, tmp_path, caplog, column):
    """A bomb with a right checksum is not expanded beyond the length of its trajectory."""
    shutil.copy(good, path := tmp_path / "s.sqlite")
    store = Store(path)
    replace(store, trajectory(5, 0), logprobs=column)
    tracemalloc.start()
    store.recover(1, 9.0)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert len(store.waiting_groups()) == NUM_WAITING - 1 and "dropped group 5" in caplog.text
    store.close()


@pytest.mark.parametrize("column", ["prompt_index", "drawn", "size"])
def test_a_damaged_admission_is_refused(good, tmp_path, column):
    shutil.copy(good, path := tmp_path / "s.sqlite")
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE groups SET {column} = {column} + 4 WHERE group_id = 2")
    db.close()
    with pytest.raises(ValueError, match="s.sqlite: group 2 is damaged: restore the file"):
        resume(path)


def test_the_batches_of_a_stored_run_are_checked(good, tmp_path):
    shutil.copy(good, path := tmp_path / "s.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE sequences SET logprobs = zeroblob(80) WHERE group_id = 1")
    db.close()
    store = StoredBatches(path)
    with pytest.raises(ValueError, match="s.sqlite: trajectory 1/0 is damaged.*restore the file"):
        store.used_groups(0)
    store.close()


def test_a_crash_while_the_store_is_made_leaves_none(tmp_path):
    code = (
        "import os, sqlite3, sys; from pathlib import Path\n"
        "from areal_lite.run_dir.store import Store\n"
        "Path.rename = lambda *_: os.kill(os.getpid(), 9)\n"
        "Store(Path(sys.argv[1]))"
    )
    path = tmp_path / "trajectories.sqlite"
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == -9
    assert not path.exists()
    store = Store(path)
    fill(store)
    store.close()
    assert resume(path)[0] == NUM_WAITING


def test_the_checksum_is_that_of_zlib():
    """A reader in another language can check a row."""
    rows = to_rows(trajectory(1, 0), "p", "c")
    for *values, expected in (rows.facts, rows.sequence):
        assert expected == zlib.crc32(msgspec.msgpack.encode(values))
