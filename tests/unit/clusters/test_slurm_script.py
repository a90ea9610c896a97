"""The job of `areal-lite slurm`: the nodes of each role, and its text, run by bash."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from areal_lite.clusters import ClusterConfig, SlurmConfig
from areal_lite.clusters.slurm import _check_nodes, check, layout, render
from areal_lite.config import ServerConfig, TrainerConfig, load_config
from areal_lite.launch.prepare import write
from areal_lite.run_dir.paths import CHECKPOINT_MARKER
from areal_lite.system.gpus import divide_gpus

RUN, WORK = Path("/shared/runs/it's one"), Path("/shared/code")
PYXIS = {"container": "pyxis", "image": "a b.sqsh", "mounts": ["/data", "/x:/y"]}
APPTAINER = {"container": "apptainer", "image": "i.sif", "mounts": ["/data"]}
# The body of a stand-in for srun in which the servers outlive all other steps.
SERVERS_STAY = '[[ "$*" == *launch.server_pool* ]] && sleep 1; exit 0'


def config(nodes: int, ranks: int, servers: int, size: int = 1, **cluster) -> SlurmConfig:
    return SlurmConfig(
        model="m",
        trainer=TrainerConfig(data_parallel=ranks),
        server=ServerConfig(count=servers, tensor_parallel=size, host="node", api_key="secret"),
        cluster=ClusterConfig(nodes=nodes, python="python3", **cluster),
    )


def run_by_bash(text: str, folder: Path, srun: str) -> int:
    """Run a job with stand-ins for Slurm's commands and return its exit status.

    `srun` is the body of a shell script. A requeue writes the arguments of scontrol to `requeued`.
    """
    requeue = f'[ "$1" = requeue ] && echo "$@" > {folder}/requeued'
    tools = {"srun": srun, "scontrol": f"{requeue}\nprintf 'first\\nsecond\\n'"}
    for name, body in tools.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "x",
    }
    command = ["bash", "-c", text]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.run(command, env=environment, timeout=20, **quiet).returncode


def steps_of(text: str, folder: Path) -> dict[str, list[str]]:
    """Run a job to its end and return the arguments of srun by the name of the step."""
    note = f'printf "%s\\0" "$@" > "$(mktemp {folder}/call.XXXX)"'
    # A trainer cannot end before there are servers; a busy machine may start them late.
    waits = f"until grep -qs job-name=servers {folder}/call.*; do sleep 0.01; done"
    servers_first = f'[[ "$*" == *trainer.loop* ]] && {waits}'
    assert run_by_bash(text, folder, f"{note}\n{servers_first}\n{SERVERS_STAY}") == 0
    calls = [file.read_text().split("\0")[:-1] for file in folder.glob("call.*")]
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
    text = render(config(nodes, ranks, servers, size), RUN, WORK)
    assert f"#SBATCH --nodes={nodes}\n" in text and "#SBATCH --gpus-per-node=8\n" in text
    assert "secret" not in text
    calls = steps_of(text, tmp_path)
    assert set(calls) == {*steps, "begin", "end"}, "a run that ended well gets its summary"
    for name, (first, count) in steps.items():
        assert f"--relative={first}" in calls[name] and f"--nodes={count}" in calls[name]
        assert f"--output={RUN}/logs/{name}-%N.log" in calls[name]
    trainer = calls["trainer"]
    trainer_nodes = int(steps["trainer"][1])
    assert "--rdzv-endpoint=first:20007" in trainer and trainer[-1] == str(RUN)
    assert f"--nnodes={trainer_nodes}" in trainer
    assert f"--nproc-per-node={ranks // trainer_nodes}" in trainer
    assert f"SLURM_PROCID * {servers // int(steps['servers'][1])}))" in " ".join(calls["servers"])


def test_a_stopped_run_goes_back_to_the_queue(tmp_path):
    """SIGUSR1 during the steps makes the file `stop`. The job waits on, and requeues at the end.

    The controller ends when the signal comes. Bash's `wait -n` misses that in half of the jobs.
    """
    run = tmp_path / "run"
    run.mkdir()
    text = render(config(2, 8, 8), run, WORK)
    assert "#SBATCH --signal=B:USR1@600\n" in text and "#SBATCH --requeue\n" in text
    wait = f"kill -USR1 $TOP; while [ ! -e {run}/stop ]; do sleep 0.02; done"
    failing = '[[ "$*" == *launch.server_pool* ]] && { sleep 5; exit 9; }; exit 0'
    srun = f'[[ "$*" == *trainer.loop* ]] && {{ {wait}; }}\n{failing}'
    for _ in range(5):
        (run / "stop").unlink(missing_ok=True)
        (tmp_path / "requeued").unlink(missing_ok=True)
        assert run_by_bash("export TOP=$$\n" + text, tmp_path, srun) == 0
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_chain_does_not_requeue():
    chain = render(config(2, 8, 8, chain=3), RUN, WORK)
    assert "scontrol requeue" not in chain and "#SBATCH --no-requeue\n" in chain
    assert "USR1@600" in chain
    without_stop = render(config(2, 8, 8, stop_before_s=0), RUN, WORK)
    assert "--signal" not in without_stop and "trap" not in without_stop


def test_one_node_shares_its_gpus():
    text = render(config(1, 2, 3, 2), RUN, WORK)
    assert "env CUDA_VISIBLE_DEVICES=2,3,4,5,6,7 bash" in text
    assert "env CUDA_VISIBLE_DEVICES=0,1 python3" in text
    servers, _, trainer = text.partition("start controller")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in trainer and "MAX_CONNECTIONS" not in servers
    assert "TORCHDYNAMO_DISABLE" not in text
    without_gpus = render(config(1, 2, 3, 2, gpus_per_node=0), RUN, WORK).partition(
        "start controller"
    )[2]
    assert "TORCHDYNAMO_DISABLE=1" in without_gpus and "MAX_CONNECTIONS" not in without_gpus
    assert "CUDA_VISIBLE_DEVICES" not in render(config(2, 8, 8), RUN, WORK)


@pytest.mark.parametrize("new_checkpoint", [False, True])
def test_a_failed_job_is_requeued_if_it_saved_a_checkpoint(tmp_path, new_checkpoint):
    run = tmp_path / "run"
    old, new = (run / "checkpoints" / f"step-{step}" for step in (9, 10))
    old.mkdir(parents=True)
    (old / CHECKPOINT_MARKER).touch()
    # A folder without its marker is not complete.
    save = f"mkdir {new}; touch {new / CHECKPOINT_MARKER}; " if new_checkpoint else f"mkdir {new}; "
    srun = (
        '[[ "$*" == *prepare* ]] && exit 0\n'
        f'[[ "$*" == *controller* ]] && {{ {save}exit 3; }}\n'
        "sleep 1"
    )
    assert run_by_bash(render(config(2, 8, 8), run, WORK), tmp_path, srun) == 3
    assert (tmp_path / "requeued").exists() == new_checkpoint


@pytest.mark.parametrize("new_checkpoint", [False, True])
def test_a_damaged_checkpoint_does_not_count(tmp_path, new_checkpoint):
    """The step `begin` renames it. What a later start saves has a lower number."""
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in ("step-8", "step-20.damaged" if new_checkpoint else "step-20"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / CHECKPOINT_MARKER).touch()
    new = checkpoints / "step-12"
    save = f"mkdir {new}; touch {new / CHECKPOINT_MARKER}; " if new_checkpoint else ""
    srun = (
        f'[[ "$*" == *prepare* ]] && {{ mv {checkpoints}/step-20{{,.damaged}}; exit 0; }}\n'
        f'[[ "$*" == *controller* ]] && {{ {save}exit 3; }}\n'
        "sleep 1"
    )
    text = render(config(2, 8, 8), tmp_path / "run", WORK)
    assert run_by_bash(text, tmp_path, srun) == 3
    assert (tmp_path / "requeued").exists() == new_checkpoint


@pytest.mark.parametrize("role", ["trainer.loop", "controller"])
@pytest.mark.parametrize("failures, status", [(1, 0), (2, 0), (3, 4)])
def test_a_role_that_fails_after_a_step_is_started_again(tmp_path, role, failures, status):
    """The job allows two restarts."""
    run = tmp_path / "run"
    run.mkdir()
    made = config(2, 8, 8)
    made.restart.max = 2
    fails = f'echo >> {run}/metrics.jsonl; [ "$(wc -l < {run}/metrics.jsonl)" -le {failures} ]'
    ends = f"until [ -e {tmp_path}/done ]; do sleep 0.02; done; exit 0"
    srun = (
        '[[ "$*" == *prepare* ]] && exit 0\n'
        f'[[ "$*" == *{role}* ]] && {{ {fails} && exit 4; touch {tmp_path}/done; exit 0; }}\n'
        f'[[ "$*" == *launch.server_pool* ]] && sleep 1 || {{ {ends}; }}'
    )
    stays = f"trap 'touch {tmp_path}/done' EXIT\n"
    assert run_by_bash(stays + render(made, run, WORK), tmp_path, srun) == status
    assert len((run / "metrics.jsonl").read_text()) == min(failures + 1, 3)


@pytest.mark.parametrize("steps, starts", [([9, 7, 12], 3), ([9, 4], 2), ([9, 9], 2)])
def test_a_trainer_goes_back_to_its_checkpoint_when_it_starts_again(tmp_path, steps, starts):
    """The checkpoint is of step 4. `steps` are those that each start has at its end."""
    run = tmp_path / "run"
    (checkpoint := run / "checkpoints" / "step-4").mkdir(parents=True)
    (checkpoint / CHECKPOINT_MARKER).touch()
    made = config(2, 8, 8)
    made.restart.max = 2
    log = f"seq $(echo {' '.join(map(str, steps))} | cut -d ' ' -f $n) > {run}/metrics.jsonl"
    srun = (
        '[[ "$*" == *prepare* ]] && exit 0\n'
        f'[[ "$*" == *trainer.loop* ]] || {{ sleep 2; exit 0; }}\n'
        f"echo >> {run}/starts; n=$(wc -l < {run}/starts); {log}; exit 4"
    )
    assert run_by_bash(render(made, run, WORK), tmp_path, srun) == 4
    assert len((run / "starts").read_text()) == starts


@pytest.mark.parametrize("reason", ["no step", "stopped"])
def test_a_role_is_not_started_again_in_vain(tmp_path, reason):
    run = tmp_path / "run"
    run.mkdir()
    stops = f"echo >> {run}/metrics.jsonl; touch {run}/stop" if reason == "stopped" else "true"
    srun = (
        '[[ "$*" == *prepare* ]] && exit 0\n'
        f'[[ "$*" == *trainer.loop* ]] && {{ echo >> {run}/starts; {stops}; exit 5; }}\nsleep 1'
    )
    assert run_by_bash(render(config(2, 8, 8, chain=2), run, WORK), tmp_path, srun) == 5
    assert (run / "starts").read_text() == "\n"


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
    with pytest.raises(ValueError, match=re.escape(message)):
        layout(bad)


@pytest.mark.parametrize(
    "limit, seconds",
    [
        *(("30", 1800), ("30:05", 1805), ("2:30:05", 9005), ("24:00:00", 86_400)),
        *(("1-2", 93_600), ("1-2:30", 95_400), ("1-2:30:05", 95_405), ("90:00", 5400)),
    ],
)
def test_a_job_that_would_stop_as_it_starts_is_refused(tmp_path, limit, seconds):
    for made in (
        config(1, 1, 1, time=limit, stop_before_s=seconds),
        config(1, 1, 1, options={"time": limit}, stop_before_s=seconds),
    ):
        with pytest.raises(ValueError, match=f"cluster.time={limit} is over within"):
            check(made)
    for early_s in (seconds - 1, 0):
        _check_nodes(config(1, 1, 1, time=limit, stop_before_s=early_s))
    for without_end in ("UNLIMITED", "0"):
        _check_nodes(config(1, 1, 1, time=without_end, stop_before_s=600))


def test_a_sign_that_slurm_replaces_is_kept_in_the_folder_of_the_logs(tmp_path):
    run = Path("/shared/runs/50%j")
    text = render(config(1, 2, 3), run, WORK)
    assert "#SBATCH --output=/shared/runs/50%%j/logs/slurm-%j.log\n" in text
    calls = steps_of(text, tmp_path)
    assert "--output=/shared/runs/50%%j/logs/trainer-%N.log" in calls["trainer"]
    assert calls["trainer"][-1] == str(run)


@pytest.mark.parametrize("gpus, refused", [(8, True), (0, False)])
def test_the_devices_are_those_of_the_nodes(tmp_path, monkeypatch, gpus, refused):
    """A machine without GPUs submits a model whose window SGLang leaves out on GPUs."""
    monkeypatch.setattr("areal_lite.system.gpus._device_count", lambda: 0)
    described = {"model_type": "mistral", "sliding_window": 64}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(described | sizes))
    (tmp_path / "tokenizer.json").write_text("{}")
    made = config(2, 8, 8, gpus_per_node=gpus)
    made.model, made.run_dir = str(tmp_path), str(tmp_path / "run")
    made.data.source = "addition"
    made.reward.function = "areal_lite_quickstart.addition:addition_reward"
    with pytest.raises(ValueError, match="windows of 64") if refused else nullcontext():
        check(made)


def test_nodes_without_gpus():
    without = config(4, 4, 4, gpus_per_node=0, trainer_nodes=2)
    nodes = layout(without)
    assert (nodes.trainer_nodes, nodes.ranks_per_node) == (2, 2)
    assert (nodes.server_nodes, nodes.servers_per_node) == (2, 2)
    assert "gpus-per-node" not in render(without, RUN, WORK)


def test_options_and_setup_of_a_site():
    options = {"partition": "big", "mem_per_gpu": "8G", "exclusive": False}
    text = render(config(2, 8, 8, options=options, setup=["module load x"]), RUN, WORK)
    assert "#SBATCH --partition=big\n#SBATCH --mem-per-gpu=8G\n" in text
    assert "--exclusive" not in text and "\nmodule load x\n" in text
    assert "--mem=" not in text, "--mem and --mem-per-gpu exclude each other"
    assert "#SBATCH --mem=0\n" in render(config(2, 8, 8), RUN, WORK)
    name = shlex.quote(f"areal_lite:{RUN}")
    assert f"#SBATCH --job-name={name}\n" in text, "sbatch reads its options as a shell does"


def test_pyxis(tmp_path):
    call = steps_of(render(config(2, 8, 8, **PYXIS), RUN, WORK), tmp_path)["controller"]
    assert "--container-image=a b.sqsh" in call
    assert f"--container-mounts={WORK}:{WORK},/data:/data,/x:/y" in call


def test_apptainer(tmp_path):
    call = steps_of(render(config(2, 8, 8, **APPTAINER), RUN, WORK), tmp_path)["controller"]
    inside = (
        f"apptainer exec --nv --bind {WORK}:{WORK} --bind /data:/data --pwd {WORK} i.sif python3"
    ).split()
    assert call[call.index("apptainer") :][: len(inside)] == inside


@pytest.mark.parametrize(
    "job",
    [
        config(1, 2, 3, 2),
        config(2, 8, 8),
        config(4, 4, 4, gpus_per_node=0, trainer_nodes=2, setup=["module load x"]),
        config(2, 8, 8, chain=2),
        config(2, 8, 8, stop_before_s=0),
        config(2, 8, 8, **PYXIS),
        config(2, 8, 8, **APPTAINER),
    ],
)
def test_shellcheck_finds_nothing(tmp_path, job):
    """The run directory has no apostrophe, which shellcheck takes for a mistake."""
    script = tmp_path / "job.sh"
    script.write_text(render(job, Path("/shared/runs/one run"), WORK))
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_path_of_the_interpreter_may_have_spaces(tmp_path):
    made = config(2, 8, 8)
    made.cluster.python = "/my tools/python"
    for name, call in steps_of(render(made, RUN, WORK), tmp_path).items():
        if name == "servers":
            shell = call[call.index("bash") :]
            assert shell[1] == "-c" and shell[3:] == [made.cluster.python, str(RUN)]
            assert shell[2].startswith('exec "$0" -m areal_lite.launch.server_pool "$1" ')
        else:
            assert made.cluster.python in call


def test_the_run_directory_has_the_configuration_of_training(tmp_path):
    made = config(2, 8, 8)
    made.run_dir = str(tmp_path / "run")
    assert write(made) == tmp_path / "run"
    assert load_config(tmp_path / "run").server.api_key == "secret"


def test_gpus_are_dealt_to_servers():
    assert divide_gpus(list("0123"), 2, 2) == [["0", "1"], ["2", "3"]] and divide_gpus(
        [], 2, 2
    ) == [[], []]
    with pytest.raises(ValueError, match="4 GPUs for 3 servers of 2"):
        divide_gpus(list("0123"), 3, 2)
