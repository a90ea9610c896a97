"""A run that is killed, or loses power, at each of its writes.

Whatever is left, the audit accepts it, and a resumed run has lost no step that a checkpoint has.
"""

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from areal_lite.run_dir.metrics import forget_after
from areal_lite.run_dir.resume import set_aside_damaged, start_version
from areal_lite.run_dir.store import Store
from areal_lite.tools.audit.audit import audit
from tests.unit.tools.audit.disk import Disk, Write, recorded, restore

# It dies without closing its files.
LIFE = """
import os, sys
from pathlib import Path
from tests.unit.tools.audit.history import History
run = History(Path(sys.argv[1]))
run.admit()
run.admit()
run.fail()
run.admit()
run.filter()
for number in range(6):
    run.admit()
    run.admit()
    run.finish()
    run.finish()
    run.train()
    if number % 3 == 1:
        run.save()
        run.trim()
os._exit(0)
"""
LIVES = 3


@pytest.fixture(scope="module")
def writes(tmp_path_factory) -> list[Write]:
    root = tmp_path_factory.mktemp("recorded")
    return recorded([LIFE] * LIVES, root / "run", root)


def check_recovery(run_dir: Path) -> None:
    """Check what a crash left, then resume, and check that."""
    assert wrong_with(run_dir) == {}
    set_aside_damaged(run_dir)
    step = start_version(run_dir)
    forget_after(run_dir, step)
    store = Store(run_dir / "trajectories.sqlite")
    store.recover(step, 2e9)
    store.close()
    assert wrong_with(run_dir) == {}
    with sqlite3.connect(run_dir / "trajectories.sqlite") as db:
        used = db.execute("SELECT count(DISTINCT step) FROM groups WHERE state = 'used'").fetchone()
    db.close()
    assert used == (step,), "a checkpoint knows of a step that the store has lost"


def wrong_with(run_dir: Path) -> dict[str, list[str]]:
    return {check.name: check.wrong for check in audit(run_dir, tokens=True) if check.wrong}


def crash(writes: list[Write], tmp_path: Path, share: float) -> int:
    """Crash after each write, or a share of them, in three ways; return the number of states."""
    disk, chooser, seen = Disk(), random.Random(5), set()
    for number, write in enumerate(writes):
        disk.apply(write)
        if chooser.random() >= share:
            continue
        for files in (disk.killed(), disk.cut(), disk.cut(chooser)):
            state = hash(tuple(sorted(files.items(), key=lambda item: item[0])))
            if "config.yaml" not in files or state in seen:
                continue
            seen.add(state)
            run_dir = tmp_path / "run"
            restore(files, run_dir)
            try:
                check_recovery(run_dir)
            except (AssertionError, ValueError) as error:
                raise AssertionError(f"after write {number}, {write[:3]}: {error}") from error
            shutil.rmtree(run_dir)
    return len(seen)


def test_a_share_of_all_crashes(writes, tmp_path) -> None:
    assert crash(writes, tmp_path, 0.03) > 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_crash_after_each_write(writes, tmp_path) -> None:
    assert crash(writes, tmp_path, 1.0) > 1000


def test_the_disk_ends_as_the_real_one(writes, tmp_path) -> None:
    disk = Disk()
    for write in writes:
        disk.apply(write)
    restore(disk.killed(), tmp_path / "run")
    assert wrong_with(tmp_path / "run") == {} and start_version(tmp_path / "run") == 15
