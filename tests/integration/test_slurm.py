"""`areal-lite slurm` on a real Slurm of four simulated nodes: two train, two generate.

Runs are stopped, roles fail, and nodes die.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from areal_lite.run_dir.resume import checkpoint_steps
from areal_lite.system.network import NODE, free_port, listen_address
from tests.integration.controller_run import wrong_with
from tests.integration.slurm_cluster import GPUS, Cluster, why_not

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]

TRAIN = [
    "+task=addition",
    "reward.function=tests.integration.toy_reward:share_of_letters",
    "rollout.group_size=8",
    "rollout.max_new_tokens=200",
    "rollout.max_concurrent=32",
    "trainer.steps=4",
    "trainer.batch_groups=4",
    "eval.problems=4",
    "sync.verify=true",
]
NODES = [
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
    # Not a folder of pytest's: munge's own user must be able to read it.
    with (
        tempfile.TemporaryDirectory(prefix="areal_lite-slurm-") as folder,
        Cluster(Path(folder), nodes=4, port=free_port()) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model") / "random"
    sizes = [
        "hidden_size=64",
        "num_layers=2",
        "num_heads=4",
        "num_kv_heads=2",
        "head_dim=16",
        "mlp_size=128",
    ]
    subprocess.run(
        [sys.executable, "-m", "areal_lite_quickstart.make_model", f"out={out}", *sizes],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    return out


def areal_lite(
    cluster: Cluster, command: str, model: Path, folder: Path, *overrides: str
) -> subprocess.CompletedProcess:
    words = [
        sys.executable,
        "-m",
        "areal_lite",
        command,
        f"model={model}",
        f"run_dir={folder}",
        *TRAIN,
        *overrides,
    ]
    return subprocess.run(
        words, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=280
    )


def submit(cluster: Cluster, model: Path, folder: Path, *overrides: str) -> list[str]:
    """Submit a run and return the numbers of its jobs."""
    done = areal_lite(cluster, "slurm", model, folder, *NODES, *overrides)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def wait_for(true: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + 400
    while not true():
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.5)


def end_of(cluster: Cluster, job: str, folder: Path) -> str:
    """Wait for the end of a job and return its state."""
    going = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
    wait_for(lambda: cluster.field(job, "JobState") not in going, folder)
    return cluster.field(job, "JobState")


def logs(folder: Path) -> str:
    return "\n".join(
        f"== {path.name}\n{path.read_text()[-3000:]}"
        for path in sorted((folder / "logs").glob("*.log"))
    )


def left(folder: Path) -> list[str]:
    """Return the processes of a run that are left ten seconds after its end."""
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


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_nothing_lost_or_repeated(folder: Path, steps: int) -> None:
    assert [m["step"] for m in metrics(folder)] == list(range(1, steps + 1)), (
        "each step is logged once"
    )
    assert wrong_with(folder) == {}
    assert json.loads((folder / "summary.json").read_text())["trajectories_lost"] == 0
    assert left(folder) == []


@pytest.mark.parametrize("parallel", ["data_parallel", "tensor_parallel"])
def test_two_nodes_train_as_one_does_and_two_generate(cluster, model, tmp_path, parallel):
    folder, again = tmp_path / "run", tmp_path / "again"
    (job,) = submit(cluster, model, folder, f"trainer.{parallel}=2", "server.count=2")
    assert end_of(cluster, job, folder) == "COMPLETED", logs(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == summary["pushes"] == 4 and summary["trajectories_lost"] == 0
    assert all(
        m["verified"] > 0 and m["logprob_diff"] < 1e-4 and not m["failed"] for m in metrics(folder)
    )
    names = {path.name for path in (folder / "logs").glob("*-node*.log")}
    on = {
        role: {name for name in names if name.startswith(role)}
        for role in ("servers", "controller", "trainer")
    }
    assert on == {
        "servers": {"servers-node3.log", "servers-node4.log"},
        "controller": {"controller-node1.log"},
        "trainer": {"trainer-node1.log", "trainer-node2.log"},
    }
    assert listen_address(NODE) in (folder / "logs" / "server-0.log").read_text(), (
        "a server listens where other nodes reach it: these nodes are one machine"
    )
    assert (folder / "config.yaml").stat().st_mode & 0o077 == 0, "it holds the servers' key"
    assert left(folder) == []

    # The same on one node. The stored batches are dealt again (tools/stored_run.py), weights
    # and optimizer start alike, and two ranks can add in one order only. Only the place of the
    # ranks differs, so every step must have the same result.
    replay = ["eval.problems=0", f"debug=train_only:{folder}", f"trainer.{parallel}=2"]
    done = areal_lite(cluster, "train", model, again, *replay)
    assert done.returncode == 0, done.stderr
    for name in ("loss", "grad_norm"):
        # The terms of the loss are of order 1, and cancel.
        assert [m[name] for m in metrics(again)] == pytest.approx(
            [m[name] for m in metrics(folder)], rel=1e-6, abs=1e-7
        ), name
    assert len({m["grad_norm"] for m in metrics(folder)}) == 4


@pytest.mark.parametrize("chain", [1, 2])
def test_a_stopped_run_resumes_from_its_checkpoint(cluster, model, tmp_path, chain):
    """The signal before the time limit ends the step with a checkpoint.

    The second start of the job, or a second job, completes the run.
    """
    folder, steps = tmp_path / "run", 12
    settings = [
        "server.count=2",
        "cluster.trainer_nodes=1",
        "cluster.nodes=2",
        f"trainer.steps={steps}",
        "eval.problems=0",
    ]
    jobs = submit(cluster, model, folder, *settings, f"cluster.chain={chain}")
    assert len(jobs) == chain
    refused = areal_lite(cluster, "slurm", model, folder, *NODES, *settings, "resume=auto")
    assert refused.returncode == 1 and "of it is in the queue" in refused.stderr
    wait_for(lambda: (folder / "metrics.jsonl").exists(), folder)
    cluster.run("scancel", "--batch", "--signal=USR1", jobs[0])
    assert [end_of(cluster, job, folder) for job in jobs] == ["COMPLETED"] * chain, logs(folder)
    assert cluster.field(jobs[0], "Restarts") == ("1" if chain == 1 else "0")
    assert chain == 1 or cluster.field(jobs[1], "StartTime") >= cluster.field(jobs[0], "EndTime"), (
        "one after the other, although there was room for both"
    )
    first = min(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*"))
    assert first < steps, "the stopped job saved a checkpoint"
    check_nothing_lost_or_repeated(folder, steps)


@pytest.mark.parametrize("dies", ["rank", "trainer_node", "server_node"])
def test_a_run_survives_the_death_of(cluster, model, tmp_path, dies):
    """The script starts a trainer again that lost a rank. Slurm requeues a job that lost a node."""
    folder, steps = tmp_path / "run", 12
    settings = [
        "cluster.nodes=3",
        "trainer.data_parallel=2",
        "server.count=1",
        f"trainer.steps={steps}",
        "trainer.save_every=2",
    ]
    (job,) = submit(cluster, model, folder, *settings, "eval.problems=0")
    wait_for(lambda: checkpoint_steps(folder / "checkpoints"), folder)
    _, second, third = cluster.nodes_of(job)
    if dies == "rank":
        (rank,) = (
            p
            for p in cluster.processes(second)
            if "areal_lite.trainer.loop" in p.cmdline()
            and "torch.distributed.run" not in p.cmdline()
        )
        rank.kill()
        assert end_of(cluster, job, folder) == "COMPLETED", logs(folder)
    else:
        with cluster.without_node(second if dies == "trainer_node" else third):
            assert end_of(cluster, job, folder) == "COMPLETED", logs(folder)
    assert cluster.field(job, "Restarts") == ("0" if dies == "rank" else "1")
    check_nothing_lost_or_repeated(folder, steps)


@pytest.mark.parametrize(
    "nodes, gpus",
    [(1, {"trainer": "0,1", "servers": "2,3"}), (2, {"trainer": "0,1,2,3", "servers": "0,1,2,3"})],
)
def test_gpus_of_the_roles(cluster, model, tmp_path, nodes, gpus):
    """A script takes the place of python, because there are no GPUs to use."""
    folder, python = tmp_path / "run", tmp_path / "python"
    python.write_text(
        """#!/bin/bash
        echo "$CUDA_VISIBLE_DEVICES"
        case "$*" in
          *launch.server_pool*) touch "$0.serves"; sleep 60 ;;
          *launch.prepare*) ;;
          *) until [ -e "$0.serves" ]; do sleep 0.1; done ;;
        esac"""
    )
    python.chmod(0o755)
    roles = {
        1: ["trainer.data_parallel=2", "server.count=2"],
        2: ["trainer.data_parallel=4", "server.count=4"],
    }[nodes]
    own = [
        f"cluster.nodes={nodes}",
        "cluster.trainer_nodes=null",
        f"cluster.gpus_per_node={GPUS}",
        f"cluster.python={python}",
    ]
    (job,) = submit(cluster, model, folder, *roles, *own)
    assert end_of(cluster, job, folder) == "COMPLETED", logs(folder)
    assert {
        role: next((folder / "logs").glob(f"{role}-*.log")).read_text().split("\n")[0]
        for role in gpus
    } == gpus


def test_a_failing_role_ends_the_job(cluster, model, tmp_path):
    folder = tmp_path / "run"
    broken = ["server.args.no_such_flag=1", "trainer.data_parallel=2", "server.count=2"]
    (job,) = submit(cluster, model, folder, *broken)
    assert end_of(cluster, job, folder) == "FAILED", logs(folder)
    assert left(folder) == []
