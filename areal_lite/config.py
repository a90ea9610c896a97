"""Typed configuration: one dataclass per part of the house, registered with Hydra. Rules that span fields are in areal_lite/validate.py.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_lite.config_algo import AlgoConfig


@dataclass
class DataConfig:
    """Where prompts come from."""

    source: str = "addition"  # addition | jsonl | hf
    path: str | None = None  # jsonl: a file; hf: a data set name or folder
    name: str | None = None  # hf: configuration name
    split: str = "train"
    eval_path: str | None = None  # jsonl: held-out file; hf: None uses eval_split
    eval_split: str = "test"
    prompt_key: str = "question"
    answer_key: str = "answer"
    chat: bool = True  # wrap the prompt in the tokenizer's chat template (ignored by addition)
    system_prompt: str | None = None
    max_prompt_tokens: int = 1024
    max_digits: int = 8  # addition: the longest operand
    shuffle: bool = True
    seed: int = 1


@dataclass
class RewardConfig:
    """What a completion is worth: `function` is `module:callable`, called as f(completion: str, answer: str) -> float, plain or async."""

    function: str = "areal_lite.rewards.addition:addition_reward"
    workers: int = 1
    timeout_s: float = 15.0
    on_failure: str = "drop"  # drop the trajectory | count it as zero


@dataclass
class ServerConfig:
    """The SGLang servers. `args` are passed to SGLang as they are (`{chunked_prefill_size: 2048}` -> `--chunked-prefill-size 2048`)."""

    count: int = 1
    device: str = "auto"  # auto | cpu | cuda
    tensor_parallel: int = 1
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 without one
    host: str = "127.0.0.1"  # | an address | node: this machine's, which the controller then uses too, for a run on several machines
    port: int = 0  # first port; 0 picks free ones
    api_key: str | None = None  # needed when host is not loopback
    mem_fraction: float | None = None
    max_total_tokens: int | None = (
        None  # KV cache slots; None lets SGLang choose (without a GPU: 65536)
    )
    max_running_requests: int | None = None
    context_length: int | None = None
    threads: int = 1  # CPU threads of a server without a GPU
    start_timeout_s: float = 600.0
    max_restarts: int = 5  # of each server; after that the run goes on without it
    health_interval_s: float = 10.0
    # A server that does not answer for so long has failed. One without a GPU may compute for many seconds before it looks up.
    health_timeout_s: float = 60.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutConfig:
    """How prompts become trajectories."""

    group_size: int = 8  # trajectories per prompt, G
    max_new_tokens: int = 512
    temperature: float = 1.0
    workflow: str = "areal_lite.rollout.workflow:single_turn"  # module:name, see docs/workflows.md
    workflow_args: dict[str, Any] = field(
        default_factory=dict
    )  # of a workflow that is a class: rollout.workflow_args.key=value
    interrupt: str = "in_place"  # in_place | retract | abort | none (none: a push waits until what is running has finished)
    max_concurrent: int = 256  # trajectories in flight over all servers, at most
    adapt_concurrency: bool = (
        False  # fewer, as many as the servers say that they can run; rollout/concurrency.py
    )
    record_text: bool = True  # keep prompt and completion text in the store
    active_sampling: bool = (
        False  # groups whose members all got the same reward are replaced until the batch is full
    )
    filters: list[str] = field(
        default_factory=list
    )  # module:function, f(group) -> None or why it is not trained on; rollout/filters.py
    retire_above: float | None = (
        None  # a prompt solved by more than this share of its last groups' trajectories is not asked again
    )


@dataclass
class ReplayConfig:
    """Batches are drawn from a buffer of trajectories of all versions, instead of oldest first; needs algo.loss=tb. buffer/replay.py."""

    capacity: int = 0  # trajectories kept of each prompt; 0 is off
    max_prompts: int = 10_000  # prompts kept
    recency_probability: float = (
        0.5  # m: how often a group is the newest one; otherwise it is drawn from all, by
    )
    by: str = "reward"  # reward (softmax) | uniform
    temperature: float = 1.0  # of the softmax


@dataclass
class BufferConfig:
    """How old a trajectory may be when it is trained on (DESIGN of staleness: docs/architecture.md)."""

    max_staleness: int = 4  # eta; 0 is synchronous
    overdue: str = "mask"  # tokens older than eta at consumption: mask the tokens | drop the group and put its prompt back
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    fixed_lag: bool = False  # an experiment's control: train only when all that eta allows is generated: tokens are exactly eta old


@dataclass
class TrainerConfig:
    """The Megatron side."""

    steps: int = 100
    batch_groups: int = 32  # groups per training step, B
    minibatches: int = 1  # optimizer updates per training step, M
    tokens_per_microbatch: int = 8192
    tensor_parallel: int = 1  # ranks that share each matrix
    sequence_parallel: bool = (
        False  # tensor-parallel ranks also share the tokens between their matrices
    )
    pipeline_parallel: int = 1  # ranks that share the layers
    virtual_pipeline: int = (
        1  # chunks of layers on each pipeline stage; more than 1 interleaves them
    )
    context_parallel: int = 1  # ranks that share each sequence
    expert_parallel: int = (
        1  # of the tensor-, context- and data-parallel ranks, how many share the experts
    )
    data_parallel: int = 1  # ranks (or whole sets of the above) with a shard of the batch each
    recompute: str = "none"  # activations computed again in the backward pass: none | selective (attention) | full (layers)
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 without one
    fp32_head: bool = False  # output layer in float32, here and in the servers of a training run
    lr: float = 1e-4
    lr_schedule: str = "constant"  # constant | linear | cosine | wsd (warm-up, stable, decay)
    lr_warmup_steps: int = 0  # updates; there are `minibatches` of them in a step
    lr_decay_steps: int | None = (
        None  # wsd: updates of the last, linear decay; None: a tenth of all
    )
    min_lr: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    max_skipped_steps: int = (
        5  # stop after so many steps in a row whose loss or gradient was not finite
    )
    threads: int = 1  # CPU threads of a rank without a GPU
    save_every: int = 0  # steps between checkpoints; 0 saves at the end only
    keep_checkpoints: int = 2  # the newest ones; 0 keeps all
    milestone_every: int = 0  # checkpoints of multiples of so many steps are kept for good; 0: none
    offload: bool = False  # between training steps, Adam moments and gradient buffers leave the GPU
    gpu_memory_fraction: float | None = None  # leave the rest to a server on the same GPU
    batch_timeout_s: float = 600.0  # longest wait for a batch, beside the start of a server

    @property
    def world_size(self) -> int:
        """Trainer ranks."""
        return (
            self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
            * self.data_parallel
        )


@dataclass
class SyncConfig:
    """How new weights reach the servers."""

    transport: str = "distributed"  # distributed (nccl or gloo broadcast) | disk
    bucket_mb: int = 512
    disk_path: str | None = (
        None  # disk: a folder that servers see too; None: <run_dir>/weights (a tmpfs is fastest)
    )
    verify: bool = False  # read tensors back from the servers after each push and compare checksums
    timeout_s: float = 120.0


@dataclass
class EvalConfig:
    """Held-out problems, on the same servers, while training goes on."""

    problems: int = 200  # 0 turns evaluation off
    every: int = 0  # steps between evaluations; 0: before and after training only
    samples: int = 1  # sampled completions a problem (at rollout.temperature); one more is greedy
    sets: list[str] = field(
        default_factory=list
    )  # further held-out problems: .jsonl files, or what data.source=hf can load


@dataclass
class LoggerConfig:
    wandb: str = "off"  # off | offline | online
    project: str = "areal_lite"


@dataclass
class TrainConfig:
    """`areal-lite train`."""

    model: str = MISSING  # a Hugging Face checkpoint folder
    run_dir: str = "runs/${now:%Y%m%d-%H%M%S}"
    seed: int = 1
    resume: str = "never"  # never | auto: go on with the run in run_dir, if there is one, from its newest checkpoint; areal_lite/resume.py
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


def save_config(config: Any, run_dir: Path) -> Path:
    """Write the resolved configuration as <run_dir>/config.yaml, whole or not at all. One that it replaces stays as config-1.yaml, -2, ..."""
    path = Path(run_dir) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        os.link(
            path, path.with_name(f"config-{1 + len(list(path.parent.glob('config-*.yaml')))}.yaml")
        )
    temporary = path.with_suffix(".tmp")
    with open(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w"
    ) as file:  # it may hold a key
        file.write(OmegaConf.to_yaml(OmegaConf.structured(config)))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    return path


def load_config(run_dir: Path, schema: type = TrainConfig) -> Any:
    """The configuration that `save_config` wrote, as the dataclass it came from. Raises ValueError if it does not fit."""
    path = Path(run_dir) / "config.yaml"
    try:
        return to_dataclass(OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.load(path)))
    except (OSError, OmegaConfBaseException) as error:
        raise ValueError(f"{path}: {error}") from error


def to_dataclass(config: DictConfig) -> Any:
    """A composed configuration as an instance of its dataclass, every interpolation resolved."""
    return OmegaConf.to_object(config)
