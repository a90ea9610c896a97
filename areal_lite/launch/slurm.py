"""`areal-lite slurm`: one job of whole nodes, in which servers, controller and trainer are named steps. `--print` shows it, and does nothing else.

The first `cluster.trainer_nodes` hold the trainer and the controller, the others the servers; a single node holds everything, its first GPUs the
trainer's. Steps find each other in the run directory, trainer ranks through torchrun's rendezvous on the first node. The job ends well when
trainer and controller have; it fails as soon as any step does; the end of the batch script ends what still runs.

The job goes back to the queue, and goes on from the newest checkpoint (areal_lite/run_dir/resume.py),

* `cluster.stop_before_s` before its time is over, after the step that the trainer is at;
* when Slurm finds a node down, which is Slurm's own doing;
* when a step fails and a checkpoint was saved since the start: that crash may not come again. One that comes before a checkpoint would.

`cluster.chain` is for sites that do not allow that. A run directory is part of its job's name, and of jobs of the same name Slurm runs one at a time.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from areal_lite.config import ClusterConfig, SlurmConfig
from areal_lite.launch.prepare import COMPLETE, write
from areal_lite.run_dir.resume import CHECKPOINTS, MARKER

JOB_FILE = "job.sbatch"


@dataclass(frozen=True)
class Layout:
    """Which nodes do what. `shared`: one node, whose `ranks_per_node` first GPUs are the trainer's and the next ones the servers'."""

    trainer_nodes: int
    ranks_per_node: int
    server_nodes: int
    servers_per_node: int
    shared: bool


def layout(config: SlurmConfig) -> Layout:
    """Raises ValueError when the roles do not fill whole nodes."""
    cluster, ranks, servers, size = (
        config.cluster,
        config.trainer.world_size,
        config.server.count,
        config.server.tensor_parallel,
    )
    gpus = cluster.gpus_per_node
    if cluster.nodes == 1:
        if gpus and ranks + servers * size > gpus:
            raise ValueError(
                f"cluster.gpus_per_node={gpus}: {ranks} trainer ranks and {servers} servers of {size} need {ranks + servers * size};"
                " lower server.count or trainer.data_parallel, or raise cluster.nodes"
            )
        return Layout(1, ranks, 1, servers, shared=True)
    first = cluster.trainer_nodes or (-(-ranks // gpus) if gpus else 1)
    rest = cluster.nodes - first
    if rest < 1:
        raise ValueError(
            f"cluster.nodes={cluster.nodes}: the trainer's {ranks} ranks take {first} and leave none for servers"
        )
    if ranks % first or (gpus and ranks // first > gpus):
        raise ValueError(
            f"{ranks} trainer ranks cannot be dealt equally to cluster.trainer_nodes={first} of {gpus} GPUs: change one of them"
        )
    most = rest * (gpus // size) if gpus else rest * max(1, servers // rest)
    if servers % rest or servers > most:
        fit = f"server.count={most}" if most else f"server.tensor_parallel of at most {gpus}"
        raise ValueError(
            f"server.count={servers}: {rest} nodes of {gpus} GPUs hold equally many servers of {size}; use {fit}"
        )
    return Layout(first, ranks // first, rest, servers // rest, shared=False)


def run(config: SlurmConfig) -> int:
    """Write the run directory and the job, submit it as often as `cluster.chain` says, print the jobs' numbers. Returns the exit status.
    Raises ValueError when a job of this run directory is in the queue already: it would find settings and keys changed."""
    folder = Path(config.run_dir).resolve()
    text = script(config, folder, Path.cwd())
    if number := _queued(_name(config.cluster, folder)):
        raise ValueError(
            f"run_dir={config.run_dir}: job {number} of it is in the queue, scancel it first or choose another folder"
        )
    run_dir = write(config)
    job = run_dir / JOB_FILE
    job.write_text(text)
    print(f"run directory: {run_dir}", file=sys.stderr)
    for _ in range(config.cluster.chain):
        try:
            submitted = subprocess.run(
                ["sbatch", "--parsable", str(job)], stdout=subprocess.PIPE, text=True
            )
        except FileNotFoundError:
            raise ValueError(f"sbatch was not found: submit {job} where it is") from None
        if submitted.returncode:
            return submitted.returncode
        print(submitted.stdout.strip().partition(";")[0])
    return 0


def _queued(name: str) -> str | None:
    """The number of our job of this name, if there is one that has not ended."""
    try:
        listed = subprocess.run(
            ["squeue", "--me", "--noheader", "--format=%A %j"], stdout=subprocess.PIPE, text=True
        ).stdout
    except FileNotFoundError:
        return None
    return next(
        (
            number
            for number, _, job in (line.partition(" ") for line in listed.splitlines())
            if job == name
        ),
        None,
    )


def _name(cluster: ClusterConfig, run_dir: Path) -> str:
    return f"{cluster.job_name}:{run_dir}"


def show(config: SlurmConfig) -> int:
    """Print the job."""
    print(script(config, Path(config.run_dir).resolve(), Path.cwd()), end="")
    return 0


def script(config: SlurmConfig, run_dir: Path, work_dir: Path) -> str:
    """The text of the job. Pure; raises ValueError as `layout` does."""
    cluster, plan = config.cluster, layout(config)
    python = shlex.quote(
        cluster.python or (sys.executable if cluster.container == "none" else "python3")
    )
    ranks, servers, size = plan.ranks_per_node, plan.servers_per_node, config.server.tensor_parallel
    mine = theirs = ""  # GPUs of the trainer's ranks and of the servers, where they share a node
    if plan.shared and cluster.gpus_per_node:
        mine, theirs = (
            f"env CUDA_VISIBLE_DEVICES={_numbers(*span)} "
            for span in ((0, ranks), (ranks, ranks + servers * size))
        )
    server_node = 0 if plan.shared else plan.trainer_nodes
    setup = "".join(f"{line}\n" for line in cluster.setup)
    return f"""#!/bin/bash
{_directives(cluster, run_dir)}

{setup}run_dir={shlex.quote(str(run_dir))}
work_dir={shlex.quote(str(work_dir))}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
export PYTHONUNBUFFERED=1 TORCHDYNAMO_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS={config.trainer.threads}
export SLURM_KILL_BAD_EXIT=1 # a trainer without one of its nodes would wait for it

step() {{ # NAME FIRST_NODE NODES COMMAND...: one task on each of these nodes, counted from 0, logging to logs/NAME-<node>.log
  local name=$1 first=$2 nodes=$3
  shift 3
  srun --job-name="$name" --relative="$first" --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --overlap --cpu-bind=none \\
    --chdir="$work_dir" --output="$run_dir/logs/$name-%N.log" --open-mode=append {_contained(cluster)}"$@"
}}

next() {{ # the status of the next step that ends; 138 says that SIGUSR1 came, which is no end
  local status=138
  while [ "$status" -eq 138 ]; do
    wait -n
    status=$?
  done
  return "$status"
}}

newest() {{ # the newest complete checkpoint
  ls -d "$run_dir"/{CHECKPOINTS}/step-*/{MARKER} 2> /dev/null | sort -V | tail -n 1
}}
{_stop(cluster)}
begun=$(newest)
step begin 0 1 {python} -m areal_lite.launch.prepare begin "$run_dir"
case $? in 0) ;; {COMPLETE}) exit 0 ;; *) exit 1 ;; esac

SLURM_KILL_BAD_EXIT=0 step servers {server_node} {plan.server_nodes} {theirs}bash -c \\
  'exec {python} -m areal_lite.launch.server_pool "$0" $((SLURM_PROCID * {servers})) {servers}' "$run_dir" &
step controller 0 1 {python} -m areal_lite.controller.service "$run_dir" &
step trainer 0 {plan.trainer_nodes} {mine}{python} -m torch.distributed.run --nnodes={plan.trainer_nodes} --nproc-per-node={ranks} \\
  --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID" -m areal_lite.trainer.loop "$run_dir" &

# Trainer and controller end well, in either order; the servers only end when they fail.
next && next
status=$?
if [ "$status" -eq 0 ]; then
  step end 0 1 {python} -m areal_lite.launch.prepare end "$run_dir"
else
  echo "a step ended with status $status: see $run_dir/logs" >&2
fi
{_requeue(cluster)}exit "$status"
"""


def _stop(cluster: ClusterConfig) -> str:
    return (
        "trap 'touch \"$run_dir/stop\"' USR1 # the trainer ends with its step and a checkpoint\n"
        if cluster.stop_before_s
        else ""
    )


def _requeue(cluster: ClusterConfig) -> str:
    if cluster.chain > 1:
        return ""
    return """if [[ $status -eq 0 && -e $run_dir/stop || $status -ne 0 && $(newest) != "$begun" ]]; then
  scontrol requeue "$SLURM_JOB_ID" # there are steps left; or it came further than where it began, and may again
fi
"""


def _directives(cluster: ClusterConfig, run_dir: Path) -> str:
    options = {
        "job-name": _name(cluster, run_dir),
        "dependency": "singleton",
        "nodes": cluster.nodes,
        **({"gpus-per-node": cluster.gpus_per_node} if cluster.gpus_per_node else {}),
        "time": cluster.time,
        "exclusive": True,
        **(
            {} if any(name.startswith("mem") for name in cluster.options) else {"mem": 0}
        ),  # all that the nodes have
        "output": f"{run_dir}/logs/slurm-%j.log",
        "open-mode": "append",
        **({"signal": f"B:USR1@{cluster.stop_before_s}"} if cluster.stop_before_s else {}),
        "requeue" if cluster.chain == 1 else "no-requeue": True,
        **{name.replace("_", "-"): value for name, value in cluster.options.items()},
    }
    return "\n".join(
        f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for name, value in options.items()
        if value is not None and value is not False
    )


def _contained(cluster: ClusterConfig) -> str:
    """What runs a step's command in the container: options of srun, or a command before it. The working directory is the same inside."""
    if cluster.container == "none":
        return ""
    image = shlex.quote(cluster.image)
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in cluster.mounts]
    if cluster.container == "pyxis":
        bound = "".join("," + shlex.quote(mount) for mount in mounts)
        return f'\\\n    --container-image={image} --container-mounts="$work_dir:$work_dir"{bound} --container-workdir="$work_dir" '
    bound = "".join(f" --bind {shlex.quote(mount)}" for mount in mounts)
    gpus = " --nv" if cluster.gpus_per_node else ""
    return f'\\\n    apptainer exec{gpus} --bind "$work_dir:$work_dir"{bound} --pwd "$work_dir" {image} '


def _numbers(first: int, end: int) -> str:
    return ",".join(str(number) for number in range(first, end))
