"""Settings of a Slurm job."""

from dataclasses import dataclass
from typing import Any

from areal_lite.config.fields import WEEK_S, setting


@dataclass
class ClusterConfig:
    """The Slurm job: whole nodes, all alike, with a file system that they share."""

    nodes: int = setting(1, "Number of nodes.", minimum=1, maximum=10_000)
    gpus_per_node: int = setting(
        8, "GPUs of a node. 0: nodes without GPUs.", minimum=0, maximum=1024
    )
    trainer_nodes: int | None = setting(
        None,
        "The first nodes, which hold the trainer; the others hold the servers. null: as many as "
        "the trainer's ranks need. A single node holds both.",
        minimum=1,
        maximum=10_000,
    )
    time: str = setting("24:00:00", "Time limit of the job, as Slurm writes it.")
    stop_before_s: int = setting(
        600,
        "This many seconds before the time limit the trainer finishes its step and saves a "
        "checkpoint, and the job is queued again. 0: the job just ends.",
        minimum=0,
        maximum=WEEK_S,
    )
    chain: int = setting(
        1,
        "More than 1: submit this many jobs, each to start when the previous one has ended, "
        "instead of one job that is queued again.",
        minimum=1,
        maximum=1000,
    )
    job_name: str = setting("areal_lite", "Name of the job.")
    options: dict[str, Any] = setting(
        {}, "More options of sbatch: {partition: a} is --partition=a."
    )
    setup: list[str] = setting([], "Lines of shell at the start of the job.")
    container: str = setting("none", "Container runtime.", choices=("none", "pyxis", "apptainer"))
    image: str | None = setting(None, "Image of the container.")
    mounts: list[str] = setting(
        [],
        "Folders mounted into the container besides the working directory: FOLDER or FOLDER:WHERE.",
    )
    python: str | None = setting(
        None, "Python interpreter. null: the one that submits, or python3 in a container."
    )
