"""Roles that are started one by one: any of them may die, and be started again alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_lite.launch.roles import rank_environment
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import SUMMARY_FILE
from areal_lite.system.processes import dying_with_me
from tests.integration.controller_run import wrong_with
from tests.integration.test_train import COMMON, ROOT, model

assert model  # the fixture

STEPS = 8
ROLES = {
    "servers": ["areal_lite.launch.server_pool", "0", "1", "until-end"],
    "controller": ["areal_lite.controller.service"],
    "trainer": ["areal_lite.trainer.loop"],
}


class Roles:
    """The roles of the run in `folder`, each started by its command."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self, name: str) -> None:
        module, *words = ROLES[name]
        environment = os.environ | rank_environment(on_gpu=False) | dying_with_me()
        with open(self.folder / "logs" / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, str(self.folder), *words],
                env=environment | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def wait_for_step(self, step: int) -> None:
        """Wait until so many steps are complete. The roles that were not killed must run."""
        while not any(line["step"] >= step for line in read_metrics(self.folder)):
            for name, process in self.processes.items():
                log = self.folder / "logs" / f"{name}.log"
                assert process.poll() is None, f"{name}: {log.read_text()[-3000:]}"
            time.sleep(0.05)


@pytest.fixture
def roles(model: Path, tmp_path: Path) -> Iterator[Roles]:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "areal_lite", "train", "--prepare", f"run_dir={folder}"]
    settings = [f"model={model}", *COMMON, f"trainer.steps={STEPS}", "trainer.save_every=2"]
    settings += ["rollout.max_new_tokens=100", "eval.problems=0"]
    subprocess.run([*command, *settings], cwd=ROOT, check=True, timeout=60)
    made = Roles(folder)
    for name in ROLES:
        made.start(name)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_role_that_dies_is_started_again_alone(roles: Roles) -> None:
    roles.wait_for_step(2)
    roles.kill("trainer"), roles.start("trainer")
    roles.wait_for_step(4)
    roles.kill("controller"), roles.start("controller")
    roles.wait_for_step(6)
    roles.kill("controller"), roles.kill("trainer")
    roles.start("controller"), roles.start("trainer")
    assert roles.processes["trainer"].wait(200) == 0
    assert roles.processes["controller"].wait(20) == 0
    end = [sys.executable, "-m", "areal_lite.launch.prepare", "end", str(roles.folder)]
    subprocess.run(end, cwd=ROOT, check=True, timeout=60)
    assert (roles.folder / SUMMARY_FILE).exists()
    assert roles.processes["servers"].wait(60) == 0
    assert [line["step"] for line in read_metrics(roles.folder)] == list(range(1, STEPS + 1))
    assert wrong_with(roles.folder) == {}
