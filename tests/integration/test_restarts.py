"""Controller and trainer that are killed or hang in a run: it continues by itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from areal_lite.config import TrainConfig
from areal_lite.launch import local
from areal_lite.launch.local import RESTARTS_LOG as LOG
from areal_lite.run_dir.resume import checkpoint_steps
from areal_lite.system.processes import ending
from areal_lite.tools.diagnose.diagnosis import diagnose
from areal_lite.tools.diagnose.history import read_history
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
    config.data.source = "addition"
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
@pytest.mark.slow  # test_takeover.py has trainers that are scripts, and the chaos test kills both
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_controller_and_a_stopped_trainer_start_again(
    config, number: signal.Signals, monkeypatch, capfd
) -> None:
    """The controller starts alone, the trainer with it. The servers go on.

    They are fake ones, whose tokens do not depend on the weights.
    """
    folder = Path(config.run_dir)
    (folder / "logs").mkdir(parents=True)
    pool = fake_pool(folder, "server-0", delay=0.02)
    monkeypatch.setattr(local, "train_pool", lambda *_: pool)
    over = threading.Event()
    struck: list[int] = []
    trainers: list[int] = []

    def faults() -> None:
        after_step(folder, 3, 2, over.is_set)
        trainers.append(process_of(folder, TRAINER).pid)
        struck.append(strike(folder, CONTROLLER, number))
        after_step(folder, 5, 4, over.is_set)
        struck.append(strike(folder, TRAINER, signal.SIGSTOP))
        trainers.append(struck[1])

    thread = threading.Thread(target=faults, daemon=True)
    thread.start()
    try:
        local.train(config, folder)
    finally:
        over.set()
        thread.join()
    assert trainers[0] == trainers[1], "the trainer went on without its controller"
    assert len(struck) == 2 and not any(map(psutil.pid_exists, struck))
    assert steps_of(folder) == list(range(1, STEPS + 1))
    assert wrong_with(folder) == {}
    restarts = (folder / "logs" / LOG).read_text()
    assert (
        "the controller starts again under the running trainer in 0 s (restart 1 of 5 within "
        f"an hour): controller {ending(-number)}"
    ) in restarts
    assert "from step 4 in 0 s (restart 2 of 5" in restarts
    assert "trainer hangs: it has been stopped by a signal (SIGSTOP)" in restarts
    found = {finding.name: finding.evidence for finding in diagnose(read_history(folder))}
    assert "restarts: 2; " in found["restarted"] and "SIGSTOP" in found["restarted"]
    terminal = capfd.readouterr().err
    assert all(f"restart {number} of 5" in terminal for number in (1, 2))
    controller = (folder / "logs" / "controller.log").read_text()
    assert controller.count("has unknown weights") >= 1, "the same server went on"
    assert processes_of(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_and_real_servers_survive_kills_and_a_hang(model, tmp_path) -> None:  # noqa: F811
    """A rank is killed, then the controller, then a rank is stopped; pushes are verified."""
    folder, steps = tmp_path / "run", 10
    settings = [
        *COMMON,
        "trainer.data_parallel=2",
        f"trainer.steps={steps}",
        "trainer.save_every=2",
        "buffer.max_staleness=2",
        "restart.hang_timeout_s=120",
    ]
    command = [
        *(sys.executable, "-m", "areal_lite", "train"),
        *(f"model={model}", f"run_dir={folder}", *settings),
    ]
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        is_over = lambda: process.poll() is not None  # noqa: E731
        after_step(folder, 3, 2, is_over)
        first = json.loads((folder / "servers" / "server-0.json").read_text())
        strike(folder, TRAINER, signal.SIGKILL, rank=1)
        after_step(folder, 5, 4, is_over)
        strike(folder, CONTROLLER, signal.SIGKILL)
        after_step(folder, 7, 6, is_over)
        strike(folder, TRAINER, signal.SIGSTOP, rank=1)
        after_step(folder, 9, 8, is_over)
        assert json.loads((folder / "servers" / "server-0.json").read_text()) == first
        assert process.wait(300) == 0, (tmp_path / "output").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    run = Run(folder)
    assert steps_of(folder) == list(range(1, steps + 1)) and wrong_with(folder) == {}
    assert run.summary["trajectories_lost"] == 0 and run.metrics[-1]["verified"] > 0
    assert all(m["logprob_diff"] is None or m["logprob_diff"] < 1e-4 for m in run.metrics), (
        "weights are not those that the version names"
    )
    restarts = (folder / "logs" / LOG).read_text()
    assert "trainer-1 was killed" in restarts
    assert "controller was killed" in restarts
    assert "trainer-1 hangs: it has been stopped by a signal" in restarts
    assert 'File "' in (folder / "logs" / "trainer-0.log").read_text(), "the stack of its peer"
    assert processes_of(folder) == []
