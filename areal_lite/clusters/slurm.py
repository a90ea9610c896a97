"""`areal-lite slurm`: submit a training run as one job of whole nodes (job.sbatch.j2).

The first `cluster.trainer_nodes` nodes hold the trainer and the controller, the others the servers.
A single node holds everything: its first GPUs are the trainer's. docs/running.md (Many nodes with
Slurm) has when the job goes back to the queue. A failed step without a new checkpoint ends it: the
same crash would probably come again.
"""

import math
import operator
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from areal_lite.clusters import ClusterConfig, SlurmConfig
from areal_lite.launch.prepare import COMPLETE, write
from areal_lite.launch.roles import rank_environment
from areal_lite.run_dir import paths
from areal_lite.run_dir.resume import lock_run_dir
from areal_lite.system.network import LOOPBACK, NODE

_TEMPLATE = Path(__file__).with_name("job.sbatch.j2")


class Layout(NamedTuple):
    """The nodes of each role. `shared`: one node holds both, the trainer's GPUs first."""

    trainer_nodes: int
    ranks_per_node: int
    server_nodes: int
    servers_per_node: int
    shared: bool


def layout(config: SlurmConfig) -> Layout:
    """Assign nodes to the roles. Raises ValueError when the roles do not fill whole nodes."""
    cluster = config.cluster
    gpus, size = cluster.gpus_per_node, config.server.tensor_parallel
    ranks, servers = config.trainer.world_size, config.server.count
    needed = ranks + servers * size
    if cluster.nodes == 1 and gpus and needed > gpus:
        raise ValueError(
            f"cluster.gpus_per_node={gpus}: {ranks} trainer ranks and {servers} servers of {size} "
            f"need {needed}; lower server.count or trainer.data_parallel, or raise cluster.nodes"
        )
    if cluster.nodes == 1:
        return Layout(1, ranks, 1, servers, shared=True)
    first = cluster.trainer_nodes or (-(-ranks // gpus) if gpus else 1)
    rest = cluster.nodes - first
    if rest < 1:
        raise ValueError(
            f"cluster.nodes={cluster.nodes}: the trainer's {ranks} ranks take {first} "
            "and leave none for servers; raise cluster.nodes"
        )
    if ranks % first or (gpus and ranks // first > gpus):
        raise ValueError(
            f"{ranks} trainer ranks cannot be dealt equally to cluster.trainer_nodes={first} "
            f"of {gpus} GPUs: change one of them"
        )
    most = rest * (gpus // size) if gpus else rest * max(1, servers // rest)
    if servers % rest or servers > most:
        fit = f"server.count={most}" if most else f"server.tensor_parallel of at most {gpus}"
        raise ValueError(
            f"server.count={servers}: {rest} nodes of {gpus} GPUs hold equally many servers "
            f"of {size}; use {fit}"
        )
    return Layout(first, ranks // first, rest, servers // rest, shared=False)


def check(config: SlurmConfig) -> None:
    """Check what the run needs of this machine and of files, and its layout. Raises ValueError."""
    from areal_lite.launch.preflight import check_run

    _check_nodes(config)
    server = config.server
    if server.device == "auto" and server.host == NODE:  # this machine may be none of the nodes
        server = replace(server, device="cuda" if config.cluster.gpus_per_node else "cpu")
    check_run(replace(config, server=server))
    layout(config)


def _seconds(limit: str) -> float:
    """Return a time limit of Slurm in seconds; infinity for one in words (UNLIMITED)."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit):
        return math.inf
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours = parts if days or len(parts) == 3 else [0, *parts]  # without days, minutes come first
    return 86_400 * int(days or 0) + sum(map(operator.mul, hours, (3600, 60, 1)))


def _check_nodes(config: SlurmConfig) -> None:
    cluster, sync = config.cluster, config.sync
    if cluster.container != "none" and not cluster.image:
        raise ValueError(f"cluster.container={cluster.container}: set cluster.image")
    if config.debug != "off":
        raise ValueError(f"debug={config.debug} is for one machine: use `areal-lite train`")
    limit, early_s = cluster.options.get("time") or cluster.time, cluster.stop_before_s
    if 0 < _seconds(str(limit)) <= early_s:
        raise ValueError(
            f"cluster.time={limit} is over within cluster.stop_before_s={early_s}: the job would "
            "stop as it starts. Raise the time, or lower cluster.stop_before_s (0: never)"
        )
    if cluster.nodes == 1:
        return
    if config.server.host in LOOPBACK:
        raise ValueError(
            f"server.host={config.server.host}: other nodes cannot reach that, use node"
        )
    if sync.transport == "disk" and (sync.disk_path or "").startswith("/dev/shm"):
        raise ValueError(
            f"sync.disk_path={sync.disk_path} is on one node only: use a folder that all nodes see"
        )


def run(config: SlurmConfig) -> int:
    """Write the run directory and the job, and submit it `cluster.chain` times.

    Prints their numbers on stdout. Returns the exit status. Raises ValueError when a job of this
    run directory is already in the queue: it would find changed settings and keys.
    """
    folder = Path(config.run_dir).resolve()
    text = render(config, folder, Path.cwd())
    if number := _queued(_job_name(config.cluster, folder)):
        raise ValueError(
            f"run_dir={config.run_dir}: job {number} of it is in the queue; "
            "scancel it first or choose another folder"
        )
    with lock_run_dir(folder):
        run_dir = write(config)
    job = run_dir / paths.SLURM_JOB_FILE
    job.write_text(text)
    print(f"run directory: {run_dir}", file=sys.stderr)
    for _ in range(config.cluster.chain):
        if status := _submit(job):
            return status
    return 0


def _submit(job: Path) -> int:
    """Submit the job and print its number. Returns the exit status of sbatch."""
    command = ["sbatch", "--parsable", str(job)]
    try:
        submitted = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise ValueError(f"sbatch was not found: submit {job} on a machine that has it") from None
    if submitted.returncode == 0:
        print(submitted.stdout.strip().partition(";")[0])
    return submitted.returncode


def _queued(name: str) -> str | None:
    """Return the number of the user's job with this name in the queue, if there is one."""
    command = ["squeue", "--me", "--noheader", "--format=%A %j"]
    try:
        listed = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    except FileNotFoundError:
        return None
    jobs = (line.partition(" ") for line in listed.splitlines())
    return next((number for number, _, job in jobs if job == name), None)


def show(config: SlurmConfig) -> int:
    """Print the job for `--print`, and do nothing else. Returns the exit status."""
    print(render(config, Path(config.run_dir).resolve(), Path.cwd()), end="")
    return 0


def render(config: SlurmConfig, run_dir: Path, work_dir: Path) -> str:
    """Return the text of the job; steps start in `work_dir`. Raises ValueError as `layout` does."""
    from jinja2 import Environment, StrictUndefined  # only this command needs it

    jinja = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    jinja.filters["quote"] = lambda value: shlex.quote(str(value))
    return jinja.from_string(_TEMPLATE.read_text()).render(_variables(config, run_dir, work_dir))


def _variables(config: SlurmConfig, run_dir: Path, work_dir: Path) -> dict[str, Any]:
    cluster = config.cluster
    nodes = layout(config)
    python = cluster.python or (sys.executable if cluster.container == "none" else "python3")
    environment = rank_environment(on_gpu=cluster.gpus_per_node > 0)
    trainer_gpus = server_gpus = ""
    if nodes.shared and cluster.gpus_per_node:
        ranks = nodes.ranks_per_node
        end = ranks + nodes.servers_per_node * config.server.tensor_parallel
        trainer_gpus = f"env CUDA_VISIBLE_DEVICES={','.join(map(str, range(ranks)))} "
        server_gpus = f"env CUDA_VISIBLE_DEVICES={','.join(map(str, range(ranks, end)))} "
    return {
        **vars(cluster),
        **nodes._asdict(),  # with the trainer's nodes, if the configuration leaves them open
        "options": _options(cluster, run_dir),
        "mounts": [mount if ":" in mount else f"{mount}:{mount}" for mount in cluster.mounts],
        "python": shlex.quote(python),
        "run_dir": run_dir,
        "work_dir": work_dir,
        "rank_environment": " ".join(f"{k}={shlex.quote(v)}" for k, v in environment.items()),
        "checkpoints": paths.CHECKPOINTS_DIR,
        "marker": paths.CHECKPOINT_MARKER,
        "metrics": paths.METRICS_FILE,
        "restarts": config.restart.max,
        "complete_status": COMPLETE,
        "requeue": cluster.chain == 1,
        "server_node": 0 if nodes.shared else nodes.trainer_nodes,
        "trainer_gpus": trainer_gpus,
        "server_gpus": server_gpus,
    }


def _options(cluster: ClusterConfig, run_dir: Path) -> list[str]:
    """Return the options of sbatch. `cluster.options` override ours; False or None removes one."""
    options: dict[str, Any] = {
        "job-name": _job_name(cluster, run_dir),
        "dependency": "singleton",
        "nodes": cluster.nodes,
        "gpus-per-node": cluster.gpus_per_node or None,
        "time": cluster.time,
        "exclusive": True,
        # All the memory of the nodes.
        "mem": None if any(name.startswith("mem") for name in cluster.options) else 0,
        "output": f"{str(run_dir).replace('%', '%%')}/logs/slurm-%j.log",
        "open-mode": "append",
        "signal": f"B:USR1@{cluster.stop_before_s}" if cluster.stop_before_s else None,
        "requeue" if cluster.chain == 1 else "no-requeue": True,
    }
    options |= {name.replace("_", "-"): value for name, value in cluster.options.items()}
    return [
        name if value is True else f"{name}={shlex.quote(str(value))}"
        for name, value in options.items()
        if value is not None and value is not False
    ]


def _job_name(cluster: ClusterConfig, run_dir: Path) -> str:
    return f"{cluster.job_name}:{run_dir}"
