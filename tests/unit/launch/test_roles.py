"""The environment of a trainer rank, and a run directory that somebody moves."""

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

from areal_lite.config import TrainConfig, TrainerConfig
from areal_lite.launch import local
from areal_lite.launch.roles import Roles, RunMoved, interruptible, stopped_by_hand
from areal_lite.system.files import write_atomically
from areal_lite.system.processes import tail

# Variables that slow a GPU down or bound its caches.
WITHOUT_GPU = {
    "TORCHDYNAMO_DISABLE",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
    "THP_MEM_ALLOC_ENABLE",
}


def environment_of_a_rank(folder: Path, gpus: list[str]) -> dict[str, str]:
    with Roles(folder) as roles:
        ranks = roles.start_ranks("tests.unit.launch.environment", TrainerConfig(), gpus)
        roles.wait(ranks)
        return json.loads(ranks[0].output())


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch) -> None:
    for name in WITHOUT_GPU | {"CUDA_DEVICE_MAX_CONNECTIONS"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def test_a_rank_with_a_gpu(tmp_path: Path) -> None:
    environment = environment_of_a_rank(tmp_path, ["3"])
    assert not WITHOUT_GPU & environment.keys()
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_rank_without_a_gpu(tmp_path: Path) -> None:
    environment = environment_of_a_rank(tmp_path, [])
    assert environment.keys() >= WITHOUT_GPU
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment


@pytest.mark.parametrize("how", ["moved", "replaced", "removed"])
def test_a_run_directory_that_is_moved_ends_the_run(how: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Roles(run_dir) as roles:
        role = roles.start("trainer", [sys.executable, "-c", "import time; time.sleep(60)"])
        roles.check()
        if how == "removed":
            shutil.rmtree(run_dir)
        else:
            run_dir.rename(tmp_path / "elsewhere")
        if how == "replaced":
            run_dir.mkdir()
        with pytest.raises(RunMoved) as ended:
            roles.wait([role])
    if how != "removed":
        assert ended.value.place == tmp_path / "elsewhere"
    assert f"run_dir={run_dir} has been moved: it is now {tmp_path}" in str(ended.value)
    assert role.process.returncode is not None


def test_a_run_directory_behind_a_link_is_not_moved(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with Roles(tmp_path / "link") as roles:
        roles.check()


def test_the_remedy_for_a_moved_run_is_in_its_new_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    checkpoint = new / "checkpoints" / "step-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    lines = [json.dumps({"step": step, "reward_mean": 0.5}) + "\n" for step in (1, 2, 3)]
    (new / "metrics.jsonl").write_text("".join(lines))

    def moved(*_: object) -> None:
        raise RunMoved(old, new)

    monkeypatch.setattr(local, "train", moved)
    monkeypatch.setattr(local, "observer", local.Observer)
    monkeypatch.setattr(local, "check_model_folder", lambda folder: None)
    monkeypatch.setattr(local, "check_numbers", lambda folder: None)
    config = TrainConfig(model="m", run_dir=str(old))
    with pytest.raises(RunMoved, match=f"run_dir={old} has been moved: it is now {new}"):
        local.run_locked(config)
    assert f"run_dir={new} resume=auto continues from step 2" in capsys.readouterr().err
    assert json.loads((new / "summary.json").read_text())["steps"] == 3
    assert not old.exists()


def test_no_file_makes_a_moved_run_directory_anew(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="run/heartbeats/trainer"):
        write_atomically(tmp_path / "run" / "heartbeats" / "trainer", "training")
    assert not (tmp_path / "run").exists()


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "server-0.log"
    with open(log, "wb") as file:
        # A hole: the whole file would not fit in memory.
        file.truncate(2**40)
        file.seek(0, 2)
        file.write(b"\nearlier start\n")
        start = file.tell()
        file.write(b"one\ntwo\n")
    assert tail(log, 3) == "earlier start\none\ntwo"
    assert tail(log, 3, start) == "one\ntwo" and tail(log, 1, start) == "two"


def test_nohup_keeps_a_run_alive_when_its_terminal_closes(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible(), stopped_by_hand(tmp_path):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with interruptible(), stopped_by_hand(tmp_path), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
