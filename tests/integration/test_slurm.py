"""`areal-lite slurm` on a real Slurm of four simulated nodes: two train together, two generate; a failing role ends the job."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from areal_lite.rollout.server import free_port
from tests.integration.slurm_cluster import Cluster, why_not

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]

COMMON = [
    "reward.function=tests.integration.toy_reward:share_of_letters",
    "rollout.group_size=8",
    "rollout.max_new_tokens=200",
    "rollout.max_concurrent=32",
    "trainer.steps=4",
    "trainer.batch_groups=4",
    "eval.problems=4",
    "sync.verify=true",
    "cluster.nodes=4",
    "cluster.trainer_nodes=2",
    "cluster.gpus_per_node=0",
    "cluster.time=30",
    f'cluster.setup=["export PYTHONPATH={ROOT}"]',
]


@pytest.fixture(scope="module")
def cluster():
    if reason := why_not():
        pytest.skip(reason)
    # Not one of pytest's folders: munge's own user has to get there.
    with tempfile.TemporaryDirectory(prefix="areal_lite-slurm-") as folder, Cluster(Path(folder), nodes=4, port=free_port()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model") / "random"
    sizes = ["hidden_size=64", "num_layers=2", "num_heads=4", "num_kv_heads=2", "head_dim=16", "mlp_size=128"]
    subprocess.run([sys.executable, "-m", "areal_lite", "make-model", f"out={out}", *sizes], cwd=ROOT, check=True, timeout=120)
    return out


def submit(cluster: Cluster, model: Path, folder: Path, *overrides: str) -> str:
    """The number of the job."""
    command = [sys.executable, "-m", "areal_lite", "slurm", f"model={model}", f"run_dir={folder}", *COMMON, *overrides]
    done = subprocess.run(command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(true: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + 400
    while not true():
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.5)


def end_of(cluster: Cluster, job: str, folder: Path) -> str:
    """Wait; the state that the job ends in."""
    wait_for(lambda: cluster.state(job) not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"), folder)
    return cluster.state(job)


def logs(folder: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted((folder / "logs").glob("*.log")))


def left(folder: Path) -> list[str]:
    """Processes that still know the run, ten seconds after its end at most."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(str(folder) in part for part in process.info["cmdline"] or ()):
                found.append(" ".join(process.info["cmdline"]))
        if not found:
            return []
        time.sleep(0.5)
    return found


def test_two_nodes_train_and_two_generate(cluster, model, tmp_path):
    folder = tmp_path / "run"
    job = submit(cluster, model, folder, "trainer.data_parallel=2", "server.count=2")
    assert end_of(cluster, job, folder) == "COMPLETED", logs(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == summary["pushes"] == 4 and summary["trajectories_lost"] == 0
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(m["verified"] > 0 and m["logprob_diff"] < 1e-4 and not m["failed"] for m in metrics)
    names = {path.name for path in (folder / "logs").glob("*-node*.log")}
    on = {role: {name for name in names if name.startswith(role)} for role in ("servers", "controller", "trainer")}
    assert on == {
        "servers": {"servers-node3.log", "servers-node4.log"},
        "controller": {"controller-node1.log"},
        "trainer": {"trainer-node1.log", "trainer-node2.log"},
    }
    assert "127.0.1.3" in (folder / "logs" / "server-0.log").read_text(), "a server listens at its node's own address"
    assert (folder / "config.yaml").stat().st_mode & 0o077 == 0, "it holds the servers' key"
    assert left(folder) == []


def test_a_stopped_job_goes_on_from_its_checkpoint(cluster, model, tmp_path):
    """The signal that comes before the time is over: the step ends with a checkpoint, the job is requeued, and its second start ends the run."""
    folder, steps = tmp_path / "run", 12
    job = submit(
        cluster, model, folder, "server.count=2", "cluster.trainer_nodes=1", "cluster.nodes=2", f"trainer.steps={steps}", "eval.problems=0"
    )
    wait_for(lambda: (folder / "metrics.jsonl").exists(), folder)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert end_of(cluster, job, folder) == "COMPLETED", logs(folder)
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(1, steps + 1)), "no step is missing, none is there twice"
    first = min(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))
    assert first < steps, "the stop left a checkpoint"
    assert json.loads((folder / "summary.json").read_text())["trajectories_lost"] == 0
    assert left(folder) == []


def test_a_failing_role_ends_the_job(cluster, model, tmp_path):
    folder = tmp_path / "run"
    broken = ["+server.args.no_such_flag=1", "trainer.data_parallel=2", "server.count=2"]
    assert end_of(cluster, submit(cluster, model, folder, *broken), folder) == "FAILED", logs(folder)
    assert left(folder) == []
