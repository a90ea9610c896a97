"""Runs on clusters: `areal-lite slurm`, its settings, and the job."""

from dataclasses import dataclass, field
from typing import Any

from areal_lite.config import TrainConfig
from areal_lite.config.commands import Command, Mode
from areal_lite.config.fields import WEEK_S, setting


@dataclass
class ClusterConfig:
    """The Slurm job: whole nodes, all alike, with a file system that they share."""

    nodes: int = setting(1, "Number of nodes.", within=(1, 10_000))
    gpus_per_node: int = setting(8, "GPUs of a node. 0: nodes without GPUs.", within=(0, 1024))
    trainer_nodes: int | None = setting(
        None,
        "Nodes of the trainer; the others hold the servers. null: as many as its ranks need.",
        within=(1, 10_000),
    )
    time: str = setting("24:00:00", "Time limit of the job, as Slurm writes it.")
    stop_before_s: int = setting(
        600,
        "Seconds before the time limit at which the trainer finishes its step and saves a "
        "checkpoint, and the job is queued again. 0: the job just ends.",
        within=(0, WEEK_S),
    )
    chain: int = setting(
        1,
        "Jobs to submit, to run one after the other. 1: a single job, which requeues itself.",
        within=(1, 1000),
    )
    job_name: str = setting("areal_lite", "Name of the job.")
    options: dict[str, Any] = setting(
        {}, "More options of sbatch: {partition: a} is --partition=a."
    )
    setup: list[str] = setting([], "Lines of shell at the start of the job.")
    container: str = setting("none", "Container runtime.", choices=("none", "pyxis", "apptainer"))
    image: str | None = setting(None, "Image of the container.")
    mounts: list[str] = setting(
        [], "More folders to mount into the container: FOLDER or FOLDER:WHERE."
    )
    python: str | None = setting(
        None, "Python interpreter. null: the interpreter that submits, or python3 in a container."
    )


@dataclass
class SlurmConfig(TrainConfig):
    """A training run on a Slurm cluster: the settings of `train`, and of the job."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)


SLURM = Command(
    schema=SlurmConfig,
    entry="areal_lite.clusters.slurm:run",
    check="areal_lite.clusters.slurm:check",
    modes={
        "--print": Mode(
            entry="areal_lite.clusters.slurm:show", does="prints the job, submits nothing"
        )
    },
)
