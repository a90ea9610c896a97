"""TODO docstring."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from areal_lite.config.algo import AlgoConfig
from areal_lite.config.schema import (
    BufferConfig,
    DataConfig,
    EvalConfig,
    LoggerConfig,
    RewardConfig,
    RolloutConfig,
    ServerConfig,
    SyncConfig,
    TrainerConfig,
)


@dataclass
class TrainConfig:
    """`areal-lite train`."""

    model: str = MISSING  # a Hugging Face checkpoint folder
    run_dir: str = "runs/${now:%Y%m%d-%H%M%S}"
    seed: int = 1
    resume: str = "never"  # never | auto: go on with the run in run_dir, if there is one, from its newest checkpoint; areal_lite/run_dir/resume.py
    debug: str = "off"  # off | rollout_only (generate and store, train nothing) | train_only (on the batches of debug_run); launch/debug.py
    debug_run: str | None = None  # train_only: the directory of a stored run
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


@dataclass
class ClusterConfig:
    """Where `areal-lite slurm` runs: whole nodes, all alike, with a file system that they share; launch/slurm.py."""

    nodes: int = 1
    gpus_per_node: int = 8  # 0: nodes without GPUs
    trainer_nodes: int | None = (
        None  # the first ones; None: as many as its ranks need. The others are the servers'; a single node is both's
    )
    time: str = "24:00:00"
    # Before that time is over the trainer is asked to end with its step and a checkpoint, and the job goes on in the queue; 0: it just ends.
    stop_before_s: int = 600
    chain: int = 1  # more: so many jobs, each begun when the one before has ended, instead of one that goes back to the queue
    job_name: str = "areal_lite"
    options: dict[str, Any] = field(
        default_factory=dict
    )  # further ones of sbatch: {partition: a} is --partition=a
    setup: list[str] = field(default_factory=list)  # lines of shell at the start of the job
    container: str = "none"  # none | pyxis | apptainer
    image: str | None = None  # of the container
    mounts: list[str] = field(
        default_factory=list
    )  # into the container, beside the working directory: FOLDER or FOLDER:WHERE
    python: str | None = None  # None: the one that submits; in a container python3


@dataclass
class SlurmConfig(TrainConfig):
    """`areal-lite slurm`: all of `train`, and where it runs."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass
class MakeModelConfig:
    """`areal-lite make-model`: a randomly initialised checkpoint with a character tokenizer."""

    out: str = MISSING
    architecture: str = "qwen3"  # qwen3 | qwen2 | llama | mistral | qwen3_moe
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_size: int = 384
    num_experts: int = 8  # of a layer of a mixture of experts, each of mlp_size
    experts_per_token: int = 2
    tie_embeddings: bool = True
    max_position: int = 2048
    rope_theta: float = 10000.0
    init_std: float = 0.09
    seed: int = 1


@dataclass
class SftConfig:
    """`areal-lite sft`: supervised warm-up on generated demonstrations of an imperfect teacher, on the same Megatron engine."""

    model: str = MISSING
    out: str = MISSING
    run_dir: str = "runs/sft-${now:%Y%m%d-%H%M%S}"
    seed: int = 1
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    batch_size: int = 64
    forget_carry: float = 0.45  # how often the teacher forgets a carry


@dataclass
class QuickstartConfig(TrainConfig):
    """`areal-lite quickstart`: all of `train`, and the two commands before it; conf/quickstart.yaml ties them together."""

    make_model: MakeModelConfig = field(default_factory=MakeModelConfig)
    sft: SftConfig = field(default_factory=SftConfig)


@dataclass
class EvalCommandConfig:
    """`areal-lite eval`: greedy accuracy and unbiased pass@k of a checkpoint."""

    model: str = MISSING
    run_dir: str = "runs/eval-${now:%Y%m%d-%H%M%S}"
    seed: int = 1
    problems: int = 200
    samples: int = 4
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class GenerateConfig:
    """`areal-lite generate`: try prompts on a checkpoint."""

    model: str = MISSING
    run_dir: str = "runs/generate-${now:%Y%m%d-%H%M%S}"
    seed: int = 1
    prompts: list[str] = field(default_factory=list)  # empty: a few held-out problems
    samples: int = 1
    data: DataConfig = field(default_factory=DataConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


COMMANDS: dict[str, type] = {
    "train": TrainConfig,
    "slurm": SlurmConfig,
    "prepare": TrainConfig,
    "quickstart": QuickstartConfig,
    "make-model": MakeModelConfig,
    "sft": SftConfig,
    "eval": EvalCommandConfig,
    "generate": GenerateConfig,
}


def register() -> None:
    """Make the schemas known to Hydra, and `${token:}`, a random key; conf/<command>.yaml extend them."""
    OmegaConf.register_new_resolver(
        "token", lambda: secrets.token_hex(16), use_cache=True, replace=True
    )
    store = ConfigStore.instance()
    for command, schema in COMMANDS.items():
        store.store(name=f"{command}_schema", node=schema)
