"""Settings of the trainer and of the training log."""

from dataclasses import dataclass, field

from areal_lite.config.fields import MAX_COUNT, MAX_TOKENS, WEEK_S, setting


@dataclass
class LoraConfig:
    """Low-rank adapters, which are trained in place of the model's own weights."""

    rank: int = setting(
        0, "Rank of the adapters. 0: no adapters, all weights are trained.", minimum=0, maximum=1024
    )
    alpha: float = setting(
        32.0, "What an adapter adds is multiplied by alpha / rank.", above=0, maximum=1e6
    )
    targets: list[str] = setting(
        ["qkv", "proj", "fc1", "fc2"],
        "Layers with an adapter: query, key and value (qkv), output of attention (proj), gate and "
        "up (fc1), down (fc2). A mixture of experts takes qkv and proj.",
        choices=("qkv", "proj", "fc1", "fc2"),
    )


@dataclass
class TrainerConfig:
    """The trainer, on Megatron-core."""

    steps: int = setting(100, "Training steps of the run.", minimum=1, maximum=10_000_000)
    batch_groups: int = setting(32, "Groups of a training step, B.", minimum=1, maximum=1_000_000)
    minibatches: int = setting(
        1, "Optimizer updates of a training step, M.", minimum=1, maximum=1_000_000
    )
    tokens_per_microbatch: int = setting(
        8192, "Tokens of one forward and backward pass.", minimum=1, maximum=MAX_TOKENS
    )
    tensor_parallel: int = setting(
        1,
        "Ranks that share each matrix, and the tokens between the matrices.",
        minimum=1,
        maximum=1024,
    )
    pipeline_parallel: int = setting(1, "Ranks that share the layers.", minimum=1, maximum=1024)
    virtual_pipeline: int = setting(
        1,
        "Chunks of layers of each pipeline stage. More than 1 interleaves them.",
        minimum=1,
        maximum=1024,
    )
    context_parallel: int = setting(1, "Ranks that share each sequence.", minimum=1, maximum=1024)
    expert_parallel: int = setting(
        1,
        "Ranks that share the experts, among the tensor-, context- and data-parallel ones.",
        minimum=1,
        maximum=1024,
    )
    data_parallel: int = setting(
        1,
        "Ranks, or whole sets of the above, that each take a shard of the batch.",
        minimum=1,
        maximum=1024,
    )
    recompute: str = setting(
        "none",
        "Activations computed again in the backward pass: none, those of attention (selective), "
        "or those of whole layers (full).",
        choices=("none", "selective", "full"),
    )
    device: str = setting(
        "auto",
        "Where to compute. auto is cuda if the machine has a GPU, else cpu.",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = setting(
        "auto",
        "Type of the weights. auto is bfloat16 on a GPU and float32 without one.",
        choices=("auto", "float32", "bfloat16"),
    )
    fp32_head: bool = setting(
        False, "Output layer in float32, in the trainer and in the servers of the run."
    )
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: str = setting(
        "adam",
        "adam is AdamW. sgd has no momentum and does not rescale the gradient, so a smaller "
        "gradient is a smaller step (trainer.clip_grad still bounds it). sgd needs no moments; in "
        "bfloat16 every data-parallel rank has all master weights.",
        choices=("adam", "sgd"),
    )
    lr: float = setting(1e-4, "Learning rate.", above=0, maximum=1)
    lr_schedule: str = setting(
        "constant",
        "Learning rate after the warm-up. wsd: constant, and in the last fifth of the updates a "
        "linear decay.",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    lr_warmup_steps: int = setting(
        0,
        "Updates of the linear warm-up; a step has trainer.minibatches of them.",
        minimum=0,
        maximum=MAX_COUNT,
    )
    min_lr: float = setting(0.0, "Learning rate at the end of the decay.", minimum=0, maximum=1)
    adam_beta2: float = setting(0.95, "Decay of Adam's second moment.", minimum=0, below=1)
    adam_eps: float = setting(1e-8, "Adam's epsilon.", minimum=1e-20, maximum=1)
    weight_decay: float = setting(0.0, "Decoupled weight decay.", minimum=0, maximum=100)
    clip_grad: float = setting(
        1.0, "Largest norm of the gradient. 0: not clipped.", minimum=0, maximum=1e6
    )
    save_every: int = setting(
        0,
        "Steps between checkpoints. 0: one every half hour. The last step always has one.",
        minimum=0,
        maximum=MAX_COUNT,
    )
    keep_checkpoints: int = setting(
        2, "Newest checkpoints to keep. 0: all.", minimum=0, maximum=1_000_000
    )
    offload: bool = setting(
        False, "Move Adam moments and gradient buffers off the GPU between training steps."
    )
    gpu_memory_fraction: float | None = setting(
        None,
        "Share of the GPU's memory for a rank, when a server shares its GPU. null: all.",
        above=0,
        maximum=1,
    )
    batch_timeout_s: float = setting(
        600.0,
        "Longest wait for a batch, in seconds, in addition to server.start_timeout_s.",
        minimum=0.001,
        maximum=WEEK_S,
    )

    @property
    def world_size(self) -> int:
        """Return the number of trainer ranks."""
        return (
            self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
            * self.data_parallel
        )


@dataclass
class LoggerConfig:
    """The training log in Weights & Biases, besides metrics.jsonl."""

    wandb: str = setting(
        "off",
        "offline writes to the run directory and needs no account.",
        choices=("off", "offline", "online"),
    )
