"""Typed configuration: one dataclass per part of the house, registered with Hydra, and every rule that spans fields.

`validate(config)` is called before anything starts. It raises ValueError with one line that names the key and says what to do,
so a mistake costs a second and no GPU time. Nothing here imports torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


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
    """What a completion is worth: `function` is `module:callable`, called as f(completion: str, answer: str) -> float."""

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
    host: str = "127.0.0.1"
    port: int = 0  # first port; 0 picks free ones
    api_key: str | None = None  # needed when host is not loopback
    mem_fraction: float | None = None
    max_total_tokens: int | None = None  # KV cache slots; None lets SGLang choose (without a GPU: 65536)
    max_running_requests: int | None = None
    context_length: int | None = None
    threads: int = 1  # CPU threads of a server without a GPU
    start_timeout_s: float = 600.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutConfig:
    """How prompts become trajectories."""

    group_size: int = 8  # trajectories per prompt, G
    max_new_tokens: int = 512
    temperature: float = 1.0
    interrupt: str = "in_place"  # in_place | retract | abort | none (none: a push waits until what is running has finished)
    max_concurrent: int = 256  # trajectories in flight over all servers
    request_timeout_s: float = 600.0
    record_text: bool = True  # keep prompt and completion text in the store


@dataclass
class BufferConfig:
    """How old a trajectory may be when it is trained on (DESIGN of staleness: docs/architecture.md)."""

    max_staleness: int = 4  # eta; 0 is synchronous
    overdue: str = "mask"  # tokens older than eta at consumption: mask the tokens | drop the group and put its prompt back


@dataclass
class AlgoConfig:
    """Advantages, loss and corrections; formulas in areal_lite/algo."""

    decoupled: bool = True  # trust region around the proximal policy; False: naive PPO around the behaviour policy
    prox: str = "recompute"  # recompute | reuse (exact with one minibatch) | loglinear
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    behavior_weight: str = "cap"  # cap (truncate) | mask (reject) | off
    behavior_cap: float = 5.0
    advantage_std: bool = True  # divide by the group's standard deviation


@dataclass
class TrainerConfig:
    """The Megatron side."""

    steps: int = 100
    batch_groups: int = 32  # groups per training step, B
    minibatches: int = 1  # optimizer updates per training step, M
    tokens_per_microbatch: int = 8192
    tensor_parallel: int = 1
    data_parallel: int = 1
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 without one
    lr: float = 1e-4
    lr_schedule: str = "constant"  # constant | linear | cosine
    lr_warmup_steps: int = 0
    min_lr: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    threads: int = 1  # CPU threads of a rank without a GPU
    save_every: int = 0  # steps between checkpoints; 0 saves at the end only
    gpu_memory_fraction: float | None = None  # leave the rest to a server on the same GPU
    batch_timeout_s: float = 600.0  # longest wait for a batch


@dataclass
class SyncConfig:
    """How new weights reach the servers."""

    transport: str = "distributed"  # distributed (nccl or gloo broadcast) | disk
    bucket_mb: int = 512
    disk_path: str | None = None  # disk: a folder that servers see too; None: <run_dir>/weights (a tmpfs is fastest)
    verify: bool = False  # read tensors back from the servers after each push and compare checksums
    timeout_s: float = 120.0


@dataclass
class EvalConfig:
    """Held-out problems, on the same servers, while training goes on."""

    problems: int = 200  # 0 turns evaluation off
    every: int = 0  # steps between evaluations; 0: before and after training only
    samples: int = 1  # sampled completions a problem (at rollout.temperature); one more is greedy


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
class MakeModelConfig:
    """`areal-lite make-model`: a randomly initialised Qwen3-architecture checkpoint with a character tokenizer."""

    out: str = MISSING
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_size: int = 384
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
    "quickstart": QuickstartConfig,
    "make-model": MakeModelConfig,
    "sft": SftConfig,
    "eval": EvalCommandConfig,
    "generate": GenerateConfig,
}


def register() -> None:
    """Make the schemas known to Hydra; conf/<command>.yaml extend them."""
    store = ConfigStore.instance()
    for command, schema in COMMANDS.items():
        store.store(name=f"{command}_schema", node=schema)


def save_config(config: Any, run_dir: Path) -> Path:
    """Write the resolved configuration as <run_dir>/config.yaml, whole or not at all."""
    path = Path(run_dir) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:  # it may hold a key
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
