"""Run on machines without a common file system: each role has a folder of its own."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from areal_lite.clusters.run_files import ENV_KEY
from areal_lite.launch.roles import rank_environment
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import CONTROLLER_FILE, SUMMARY_FILE
from areal_lite.run_dir.resume import checkpoint_steps, damage
from areal_lite.system.network import free_port
from tests.integration.controller_run import wrong_with
from tests.integration.docker_engine import docker
from tests.integration.test_train import COMMON, ROOT, model

assert model  # the fixture

STEPS = 6
KEY = "a key of the test, long enough"
IMAGE = "debian:bookworm-slim"  # any with a recent libc


class Machines:
    """The roles of a run, each in the folder of its name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run_dir = folder / "controller"
        self.processes: dict[str, subprocess.Popen] = {}
        self._hub = f"127.0.0.1:{free_port()}"
        self._first_node = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]

    def prepare(self, model: Path, *settings: str) -> None:
        command = [sys.executable, "-m", "areal_lite", "train", "--prepare"]
        own = [f"run_dir={self.run_dir}", f"model={model}", f"trainer.steps={STEPS}"]
        own += ["trainer.save_every=2", "rollout.max_new_tokens=100", "eval.problems=0"]
        own += ["sync.transport=distributed", *settings]
        subprocess.run([*command, *COMMON, *own], cwd=ROOT, check=True, timeout=60)

    def start(self, name: str) -> None:
        here = str(self.folder / name)
        join = ["areal_lite.clusters.join", here, self._hub]
        nodes = ["--nnodes=2", "--nproc-per-node=1", *self._first_node]
        module, *words = {
            "hub": ["areal_lite.clusters.hub", str(self.run_dir), *self._hub.split(":")[::-1]],
            "controller": ["areal_lite.controller.service", here],
            "servers": [*join, "servers", "0", "1"],
            "trainer": [*join, "trainer"],
            "node-0": [*join, "trainer", *nodes, "--node-rank=0"],
            "node-1": [*join, "trainer", *nodes, "--node-rank=1"],
        }[name]
        environment = os.environ | rank_environment(on_gpu=False)
        environment |= {"PYTHONPATH": str(ROOT), ENV_KEY: KEY}
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        """Kill a role with all its processes, as the loss of its machine does."""
        process = psutil.Process(self.processes.pop(name).pid)
        for one in [process, *process.children(recursive=True)]:
            one.send_signal(signal.SIGKILL)
        process.wait()

    def lose(self, name: str) -> None:
        """Lose a machine with its disk."""
        self.kill(name)
        shutil.rmtree(self.folder / name)

    def wait_for_step(self, step: int) -> None:
        """Wait until the hub knows of so many steps. The roles that were not killed must run."""
        while not any(line["step"] >= step for line in read_metrics(self.run_dir)):
            for name, process in self.processes.items():
                log = self.folder / f"{name}.log"
                assert process.poll() is None, f"{name}: {log.read_text()[-3000:]}"
            time.sleep(0.05)

    def wait_for_checkpoint(self) -> None:
        """Wait until the hub has one."""
        while not checkpoint_steps(self.run_dir / "checkpoints"):
            time.sleep(0.05)

    def check_the_end(self, *trainers: str) -> None:
        """Wait for the end of the run, and check that the hub has all of it."""
        for name in (*trainers, "controller", "servers", "hub"):
            assert self.processes[name].wait(200) == 0, name
        end = [sys.executable, "-m", "areal_lite.launch.prepare", "end", str(self.run_dir)]
        subprocess.run(end, cwd=ROOT, check=True, timeout=60)
        assert (self.run_dir / SUMMARY_FILE).exists()
        assert [line["step"] for line in read_metrics(self.run_dir)] == list(range(1, STEPS + 1))
        assert wrong_with(self.run_dir) == {}
        for name in trainers:
            own = (self.folder / name / "metrics.jsonl").read_bytes()
            assert (self.run_dir / "metrics.jsonl").read_bytes() == own


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for name in list(made.processes):
        if made.processes[name].poll() is None:
            made.kill(name)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_without_a_common_file_system(machines: Machines, model: Path) -> None:
    machines.prepare(model)
    for name in ("trainer", "servers", "controller", "hub"):
        machines.start(name)
    machines.wait_for_step(2), machines.wait_for_checkpoint()
    machines.lose("trainer"), machines.start("trainer")
    machines.wait_for_step(4)
    machines.kill("hub"), machines.start("hub")
    machines.kill("controller"), machines.start("controller")
    machines.check_the_end("trainer")
    assert not (machines.folder / "servers" / "metrics.jsonl").exists()
    assert not (machines.folder / "servers" / CONTROLLER_FILE).exists()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_nodes_that_train_together_share_no_folder(machines: Machines, model: Path) -> None:
    """A node that is lost with its disk gets the checkpoint from the hub."""
    machines.prepare(model, "trainer.data_parallel=2")
    for name in ("node-0", "node-1", "servers", "controller", "hub"):
        machines.start(name)
    machines.wait_for_step(2), machines.wait_for_checkpoint()
    machines.lose("node-1")
    assert machines.processes.pop("node-0").wait(100) != 0, "it cannot train alone"
    machines.start("node-1"), machines.start("node-0")
    machines.check_the_end("node-0", "node-1")
    for name in ("node-0", "node-1"):
        assert damage(machines.folder / name / "checkpoints" / f"step-{STEPS}") == ""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[str]:
    """A network of containers with names that begin with its own. They are removed at the end."""
    if shutil.which("docker") is None or subprocess.run(["docker", "version"]).returncode:
        pytest.skip("no Docker Engine answers")
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode:
        pytest.skip(f"{IMAGE} is not here: docker pull {IMAGE}")
    name = f"areal-lite-{secrets.token_hex(4)}"
    docker("network", "create", name)
    yield name
    for role in ("hub", "servers", "trainer"):
        subprocess.run(["docker", "rm", "-f", f"{name}-{role}"], capture_output=True)
    docker("network", "rm", name)


def start_container(network: str, role: str, command: str, *options: str) -> None:
    """Start a container that sees the program, and can write to no folder of the machine."""
    program = dict.fromkeys((sys.base_prefix, sys.prefix, str(ROOT)))
    volumes = [word for path in program for word in ("-v", f"{path}:{path}:ro")]
    variables = {"PYTHONPATH": str(ROOT), "HOME": "/tmp", ENV_KEY: KEY, "OMP_NUM_THREADS": "1"}
    settings = [word for item in variables.items() for word in ("-e", "=".join(item))]
    docker(
        *("run", "-d", "--init", "--shm-size=1g", "--name", f"{network}-{role}"),
        *("--network", network, "--hostname", role, "--network-alias", role, "-w", str(ROOT)),
        *(*volumes, *settings, *options, IMAGE, "sh", "-ec"),
        command.replace("python", sys.executable),
    )


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_containers_that_share_no_volume(network: str, model: Path) -> None:
    settings = [f"model={model}", *COMMON, "eval.problems=0", "sync.transport=distributed"]
    hub = f"""
        python -m areal_lite train --prepare run_dir=/tmp/run {" ".join(settings)}
        python -m areal_lite.clusters.hub /tmp/run 7000 & hub=$!
        python -m areal_lite.controller.service /tmp/run
        wait $hub
        python -m areal_lite.launch.prepare end /tmp/run
        python -m areal_lite diagnose --audit /tmp/run"""
    join = "exec python -m areal_lite.clusters.join /tmp/run hub:7000"
    start_container(network, "hub", hub, "-v", f"{model}:{model}:ro")
    start_container(network, "servers", f"{join} servers 0 1")
    start_container(network, "trainer", f"{join} trainer")
    for role in ("trainer", "servers", "hub"):
        status = docker("wait", f"{network}-{role}", timeout_s=300).strip()
        assert status == "0", docker("logs", f"{network}-{role}")[-3000:]
    assert "checks ok" in docker("logs", f"{network}-hub")
