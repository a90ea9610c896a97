"""The job of `areal-lite slurm`: which nodes do what, and the text, which bash must be able to read and, in part, to run."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from areal_lite.config import ClusterConfig, ServerConfig, SlurmConfig, TrainerConfig, load_config
from areal_lite.launch.prepare import write
from areal_lite.launch.slurm import layout, script
from areal_lite.run_dir.resume import MARKER
from areal_lite.system.gpus import deal

RUN, WORK = Path("/shared/runs/it's one"), Path("/shared/code")


def config(nodes: int, ranks: int, servers: int, size: int = 1, **cluster) -> SlurmConfig:
    return SlurmConfig(
        model="m",
        trainer=TrainerConfig(data_parallel=ranks),
        server=ServerConfig(count=servers, tensor_parallel=size, host="node", api_key="secret"),
        cluster=ClusterConfig(nodes=nodes, python="python3", **cluster),
    )


def run_by_bash(text: str, tmp_path: Path) -> list[list[str]]:
    """The arguments of each srun, when the job is run with an srun that only notes them."""
    tools = {
        "srun": f'printf "%s\\0" "$@" > "$(mktemp {tmp_path}/call.XXXX)"; [[ "$*" == *launch.server_pool* ]] && sleep 1; exit 0',
        "scontrol": "printf 'first\\nsecond\\n'",
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "x",
    }
    subprocess.run(["bash", "-c", text], env=environment, check=True, timeout=20)
    return [file.read_text().split("\0")[:-1] for file in tmp_path.glob("call.*")]


def by_name(calls: list[list[str]]) -> dict[str, list[str]]:
    return {
        next(a for a in call if a.startswith("--job-name")).split("=")[1]: call for call in calls
    }


@pytest.mark.parametrize(
    "nodes, ranks, servers, size, steps",
    [
        (1, 2, 3, 2, {"servers": ("0", "1"), "controller": ("0", "1"), "trainer": ("0", "1")}),
        (4, 8, 12, 2, {"servers": ("1", "3"), "controller": ("0", "1"), "trainer": ("0", "1")}),
        (32, 64, 96, 2, {"servers": ("8", "24"), "controller": ("0", "1"), "trainer": ("0", "8")}),
    ],
)
def test_steps_on_their_nodes(tmp_path, nodes, ranks, servers, size, steps):
    text = script(config(nodes, ranks, servers, size), RUN, WORK)
    assert (
        f"#SBATCH --nodes={nodes}\n" in text
        and "#SBATCH --gpus-per-node=8\n" in text
        and "secret" not in text
    )
    calls = by_name(run_by_bash(text, tmp_path))
    assert set(calls) == {*steps, "begin", "end"}, "a run that ended well has its summary written"
    for name, (first, count) in steps.items():
        assert f"--relative={first}" in calls[name] and f"--nodes={count}" in calls[name]
        assert f"--output={RUN}/logs/{name}-%N.log" in calls[name]
    trainer = calls["trainer"]
    assert "--rdzv-endpoint=first:20007" in trainer and trainer[-1] == str(RUN)
    assert (
        f"--nnodes={steps['trainer'][1]}" in trainer
        and f"--nproc-per-node={ranks // int(steps['trainer'][1])}" in trainer
    )
    assert f"SLURM_PROCID * {servers // int(steps['servers'][1])}))" in " ".join(calls["servers"])


def test_a_stopped_run_goes_back_to_the_queue(tmp_path):
    """SIGUSR1 comes while steps run: the file `stop`, no end of the wait, and at the end of the trainer a requeue."""
    text = script(config(2, 8, 8), run := tmp_path / "run", WORK)
    assert "#SBATCH --signal=B:USR1@600\n" in text and "#SBATCH --requeue\n" in text
    run.mkdir()
    wait = f"kill -USR1 $TOP; while [ ! -e {run}/stop ]; do sleep 0.02; done"
    (tmp_path / "srun").write_text(
        f'#!/bin/bash\n[[ "$*" == *loop* ]] && {{ {wait}; }}\n[[ "$*" == *launch.server_pool* ]] && sleep 1\nexit 0\n'
    )
    (tmp_path / "scontrol").write_text(
        f'#!/bin/bash\n[ "$1" = requeue ] && echo "$@" > {tmp_path}/requeued; echo first\n'
    )
    for tool in ("srun", "scontrol"):
        (tmp_path / tool).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "x",
    }
    subprocess.run(
        ["bash", "-c", "export TOP=$$\n" + text], env=environment, check=True, timeout=20
    )
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_chain_does_not_requeue():
    chain = script(config(2, 8, 8, chain=3), RUN, WORK)
    assert (
        "scontrol requeue" not in chain
        and "#SBATCH --no-requeue\n" in chain
        and "USR1@600" in chain
    )
    assert "USR1" not in script(config(2, 8, 8, stop_before_s=0), RUN, WORK).replace(
        "138 says that SIGUSR1 came", ""
    )


def test_one_node_shares_its_gpus():
    text = script(config(1, 2, 3, 2), RUN, WORK)
    assert (
        "env CUDA_VISIBLE_DEVICES=2,3,4,5,6,7 bash" in text
        and "env CUDA_VISIBLE_DEVICES=0,1 python3" in text
    )
    assert "CUDA_VISIBLE_DEVICES" not in script(config(2, 8, 8), RUN, WORK)


@pytest.mark.parametrize("further", [False, True])
def test_a_failed_step_fails_the_job_or_starts_it_again_when_it_came_further(tmp_path, further):
    text = script(config(2, 8, 8), run := tmp_path / "run", WORK)
    old, new = (run / "checkpoints" / f"step-{step}" for step in (9, 10))
    old.mkdir(parents=True)
    (old / MARKER).touch()
    save = (
        f"mkdir {new}; touch {new / MARKER}; " if further else f"mkdir {new}; "
    )  # without its marker it is not complete
    fails = f'[[ "$*" == *prepare* ]] && exit 0; [[ "$*" == *controller* ]] && {{ {save}exit 3; }}'
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{fails}\nsleep 1\n")
    (tmp_path / "scontrol").write_text(
        f'#!/bin/bash\n[ "$1" = requeue ] && echo "$@" > {tmp_path}/requeued; echo first\n'
    )
    for tool in ("srun", "scontrol"):
        (tmp_path / tool).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "x",
    }
    assert (
        subprocess.run(
            ["bash", "-c", text], env=environment, capture_output=True, timeout=20
        ).returncode
        == 3
    )
    assert (tmp_path / "requeued").exists() == further


@pytest.mark.parametrize(
    "bad, message",
    [
        (config(1, 4, 5), "cluster.gpus_per_node=8: 4 trainer ranks and 5 servers of 1 need 9"),
        (config(2, 16, 8), "the trainer's 16 ranks take 2 and leave none for servers"),
        (config(3, 8, 17), "use server.count=16"),
        (config(3, 8, 15), "hold equally many servers of 1; use server.count=16"),
        (config(4, 9, 16), "9 trainer ranks cannot be dealt equally to cluster.trainer_nodes=2"),
        (config(4, 18, 16, trainer_nodes=2), "cluster.trainer_nodes=2 of 8 GPUs"),
        (config(2, 8, 1, 16), "server.tensor_parallel of at most 8"),
    ],
)
def test_roles_fill_whole_nodes(bad, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        layout(bad)


def test_nodes_without_gpus():
    plan = layout(config(4, 4, 4, gpus_per_node=0, trainer_nodes=2))
    assert (plan.trainer_nodes, plan.ranks_per_node, plan.server_nodes, plan.servers_per_node) == (
        2,
        2,
        2,
        2,
    )
    assert "gpus-per-node" not in script(
        config(4, 4, 4, gpus_per_node=0, trainer_nodes=2), RUN, WORK
    )


def test_the_site_says_what_is_its_own():
    text = script(
        config(
            2,
            8,
            8,
            options={"partition": "big", "mem_per_gpu": "8G", "exclusive": False},
            setup=["module load x"],
        ),
        RUN,
        WORK,
    )
    assert (
        "#SBATCH --partition=big\n#SBATCH --mem-per-gpu=8G\n" in text
        and "--exclusive" not in text
        and "\nmodule load x\n" in text
    )
    assert "--mem=" not in text and "#SBATCH --mem=0\n" in script(config(2, 8, 8), RUN, WORK), (
        "one or the other"
    )
    assert f"#SBATCH --job-name={shlex.quote(f'areal_lite:{RUN}')}\n" in text, (
        "sbatch reads it as a shell does"
    )


def test_containers(tmp_path):
    pyxis = script(
        config(2, 8, 8, container="pyxis", image="a b.sqsh", mounts=["/data", "/x:/y"]), RUN, WORK
    )
    call = by_name(run_by_bash(pyxis, tmp_path))["controller"]
    assert (
        "--container-image=a b.sqsh" in call
        and f"--container-mounts={WORK}:{WORK},/data:/data,/x:/y" in call
    )
    for noted in tmp_path.glob("call.*"):
        noted.unlink()
    apptainer = script(
        config(2, 8, 8, container="apptainer", image="i.sif", mounts=["/data"]), RUN, WORK
    )
    call = by_name(run_by_bash(apptainer, tmp_path))["controller"]
    inside = f"apptainer exec --nv --bind {WORK}:{WORK} --bind /data:/data --pwd {WORK} i.sif python3".split()
    assert call[call.index("apptainer") :][: len(inside)] == inside


def test_the_run_directory_is_one_of_training(tmp_path):
    made = config(2, 8, 8)
    made.run_dir = str(tmp_path / "run")
    assert write(made) == tmp_path / "run"
    assert load_config(tmp_path / "run").server.api_key == "secret"


def test_gpus_are_dealt_to_servers():
    assert deal(list("0123"), 2, 2) == [["0", "1"], ["2", "3"]] and deal([], 2, 2) == [[], []]
    with pytest.raises(ValueError, match="4 GPUs for 3 servers of 2"):
        deal(list("0123"), 3, 2)
