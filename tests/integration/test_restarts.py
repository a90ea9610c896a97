"""Controller and trainer that are killed or hang in a run: it continues by itself."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from areal_lite.config import TrainConfig
from areal_lite.launch import local
from areal_lite.launch.restarts import LOG
from areal_lite.run_dir.resume import checkpoint_steps
from tests.integration.controller_run import wrong_with
from tests.integration.test_server_faults import fake_pool
from tests.integration.test_train import COMMON, ROOT, Run, model, processes_of  # noqa: F401

STEPS = 6


def process_of(folder: Path, module: str, rank: int = 0) -> psutil.Process | None:
    """Return the process that runs `module` for the run in `folder`; None while there is none."""
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if module in command and str(folder) in command:
                if process.environ().get("RANK", "0") == str(rank):
                    return process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return None


def strike(folder: Path, module: str, number: int, rank: int = 0) -> int:
    """Send a signal to a role when it runs, and return its process id."""
    while (process := process_of(folder, module, rank)) is None:
        time.sleep(0.02)
    os.kill(process.pid, number)
    return process.pid


def after_step(folder: Path, steps: int, saved: int, is_over: Callable[[], bool]) -> None:
    """Wait until `steps` steps are logged and the checkpoint of step `saved` is there."""
    metrics = folder / "metrics.jsonl"
    while not (
        metrics.exists()
        and metrics.read_bytes().count(b"\n") >= steps
        and saved in checkpoint_steps(folder / "checkpoints")
    ):
        assert not is_over()
        time.sleep(0.02)


CONTROLLER, TRAINER = "areal_lite.controller.service", "areal_lite.trainer.loop"


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.fixture
def config(tiny_model: str, tmp_path: Path) -> TrainConfig:
    config = TrainConfig(model=tiny_model, run_dir=str(tmp_path / "run"))
    config.reward.function = "tests.integration.toy_reward:share_of_letters"
    config.rollout.group_size, config.rollout.max_new_tokens = 3, 40
    config.rollout.temperature = 0.9  # fake servers cannot score
    config.trainer.batch_groups, config.trainer.steps, config.trainer.save_every = 4, STEPS, 2
    config.trainer.keep_checkpoints = 0
    config.eval.problems = 4
    config.sync.transport = "disk"
    config.restart.hang_timeout_s = 120.0
    return config


@pytest.mark.timeout(150)
def test_a_killed_controller_and_a_stopped_trainer_start_again(config, monkeypatch, capfd) -> None:
    """The servers go on: fake ones, whose tokens do not depend on the weights."""
    folder = Path(config.run_dir)
    (folder / "logs").mkdir(parents=True)
    pool = fake_pool(folder, "server-0", delay=0.02)
    monkeypatch.setattr(local, "train_pool", lambda *_: pool)
    over = threading.Event()
    struck: list[int] = []

    def faults() -> None:
        after_step(folder, 3, 2, over.is_set)
        struck.append(strike(folder, CONTROLLER, signal.SIGKILL))
        after_step(folder, 5, 4, over.is_set)
        struck.append(strike(folder, TRAINER, signal.SIGSTOP))

    thread = threading.Thread(target=faults, daemon=True)
    thread.start()
    try:
        local.train(config, folder)
    finally:
        over.set()
        thread.join()
    assert len(struck) == 2 and not any(map(psutil.pid_exists, struck))
    assert steps_of(folder) == list(range(1, STEPS + 1))
    assert wrong_with(folder) == {}
    restarts = (folder / "logs" / LOG).read_text()
    assert "step 2 in 1 s (restart 1 of 3 within 3600 s): controller exited with status -9" in (
        restarts
    )
    assert "from step 4 in 2 s (restart 2 of 3" in restarts
    assert "trainer hangs: it has been stopped by a signal (SIGSTOP)" in restarts
    terminal = capfd.readouterr().err
    assert all(f"restart {number} of 3" in terminal for number in (1, 2))
    controller = (folder / "logs" / "controller.log").read_text()
    assert controller.count("has unknown weights") == 2, "the same server went on"
    assert processes_of(folder) == []
