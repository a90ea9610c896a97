"""A failure of controller or trainer in a run directory: what is logged, kept and told."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lite.config import TrainConfig
from areal_lite.launch import local as module
from areal_lite.launch.local import RESTARTS_LOG as LOG
from areal_lite.launch.local import Restarts
from areal_lite.launch.roles import ProcessFailed, RoleFailed, Roles
from areal_lite.run_dir.resume import write_manifest
from areal_lite.system.processes import log_entry

STEPS = 9


@pytest.fixture
def slept(monkeypatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(
        module,
        "time",
        SimpleNamespace(sleep=seconds.append, monotonic=time.monotonic, strftime=time.strftime),
    )
    return seconds


def restarts_of(folder: Path) -> Restarts:
    config = TrainConfig(model="m", run_dir=str(folder))
    config.trainer.steps = STEPS
    return Restarts(config, folder)


def failure(folder: Path, code: str, name: str = "trainer") -> ProcessFailed:
    """Run `code` as a role until it fails."""
    with Roles(folder) as roles:
        role = roles.start(name, [sys.executable, "-c", code])
        with pytest.raises(ProcessFailed) as failed:
            roles.wait([role])
    return failed.value


def killed(folder: Path) -> ProcessFailed:
    return failure(folder, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


def raised(folder: Path, message: str) -> ProcessFailed:
    return failure(folder, f"raise KeyError({message!r})")


def trained(folder: Path, steps: int, saved: int = 0) -> None:
    lines = (json.dumps({"step": step + 1}) + "\n" for step in range(steps))
    (folder / "metrics.jsonl").write_text("".join(lines))
    if saved:
        checkpoint = folder / "checkpoints" / f"step-{saved}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").touch()
        write_manifest(checkpoint, {"weights": 0})


def test_the_next_start_finds_the_servers_and_nothing_of_the_last_one(tmp_path, slept) -> None:
    for name in ("controller.json", "heartbeats/trainer", "servers/server-0.json", "lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    trained(tmp_path, 5, saved=4)
    restarts = restarts_of(tmp_path)
    restarts.prepare(killed(tmp_path))
    assert slept == [0.0] and restarts.start == 4
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"servers/server-0.json", "lock"} <= left
    assert not left & {"controller.json", "heartbeats/trainer"}
    assert "start again from step 4 in 0 s (restart 1 of 5" in (tmp_path / "logs" / LOG).read_text()


def test_the_first_error_is_the_one_that_the_user_sees(tmp_path, slept) -> None:
    restarts = restarts_of(tmp_path)
    trained(tmp_path, 2)
    restarts.prepare(raised(tmp_path, "the cause"))
    trained(tmp_path, 0)  # it goes on from step 0
    with pytest.raises(RoleFailed) as ended:
        restarts.prepare(raised(tmp_path, "a consequence"))
    first, *_, last = str(ended.value).splitlines()
    assert first.startswith("trainer exited with status 1; the end of ")
    assert "KeyError: 'the cause'" in str(ended.value)
    assert "The last failure after it: trainer exited with status 1" in str(ended.value)
    assert last.startswith("The run ends: no step was completed before this error")
    assert log_entry(str(ended.value)) in (tmp_path / "logs" / LOG).read_text()


def test_an_error_that_comes_back_ends_the_run(tmp_path, slept) -> None:
    restarts = restarts_of(tmp_path)
    trained(tmp_path, 2)
    restarts.prepare(raised(tmp_path, "step 2 is bad"))
    with pytest.raises(RoleFailed, match=r"(?s)'step 2 is bad'.*the same error came twice"):
        restarts.prepare(raised(tmp_path, "step 2 is bad"))
    assert len(slept) == 1


def test_nothing_starts_again_when_a_stop_was_requested(tmp_path, slept) -> None:
    (tmp_path / "stop").touch()
    with pytest.raises(RoleFailed, match="asked to stop"):
        restarts_of(tmp_path).prepare(killed(tmp_path))


def test_a_killed_controller_starts_again_alone(tmp_path, slept) -> None:
    gone = ("controller.json", "heartbeats/controller")
    stay = ("heartbeats/trainer", "controller_totals.json", "servers/server-0.json")
    for name in (*gone, *stay):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "stop").touch()  # the trainer needs a controller to finish its step
    restarts = restarts_of(tmp_path)
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    failed = failure(tmp_path, code, "controller")
    started: list[tuple] = []
    roles: Any = SimpleNamespace(
        forget=lambda role: None, start_module=lambda *words: started.append(words)
    )
    restarts.replace_controller(failed, roles)
    assert slept == [0.0] and started == [("controller", module.CONTROLLER)]
    assert [(tmp_path / name).exists() for name in (*gone, *stay)] == [False] * 2 + [True] * 3
    for _ in range(4):
        restarts.replace_controller(failed, roles)
    with pytest.raises(RoleFailed, match="5 restarts within"):
        restarts.replace_controller(failed, roles)


def test_what_takes_the_trainer_along_starts_again_with_it(tmp_path) -> None:
    roles: Any = None  # nothing is started
    config = TrainConfig(model="m", run_dir=str(tmp_path))
    config.buffer.replay.capacity = 10
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    for restarts, failed in (
        (restarts_of(tmp_path), failure(tmp_path, "raise KeyError('told ranks')", "controller")),
        (restarts_of(tmp_path), killed(tmp_path)),  # a rank
        (Restarts(config, tmp_path), failure(tmp_path, code, "controller")),
    ):
        with pytest.raises(ProcessFailed) as raised_again:
            restarts.replace_controller(failed, roles)
        assert raised_again.value is failed


def test_an_error_after_the_last_step_ends_the_run(tmp_path, slept) -> None:
    restarts = restarts_of(tmp_path)
    trained(tmp_path, STEPS, saved=STEPS)
    with pytest.raises(RoleFailed, match="no step was completed before this error, or none is"):
        restarts.prepare(raised(tmp_path, "lost"))
    again = restarts_of(tmp_path)
    again.prepare(killed(tmp_path))
    assert slept == [0.0], "its end can be done again"


def test_the_cause_is_the_process_that_a_signal_killed(tmp_path) -> None:
    """The others end with errors, because they have lost it."""
    with Roles(tmp_path) as roles:
        for name, code in (
            ("controller", "raise SystemExit(1)"),
            ("trainer", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        ):
            roles.start(name, [sys.executable, "-c", code]).process.wait()
        with pytest.raises(ProcessFailed, match="trainer was killed"):
            roles.check()
