"""Settings of servers, pushes, generation, buffer, store, trainer and log."""

from dataclasses import dataclass, field
from typing import Any

from areal_lite.config.fields import MAX_COUNT, MAX_TOKENS, SECONDS, WEEK_S, setting

MAX_PROMPTS = 10_000  # that a replay buffer keeps
# Settings of other systems that sample from a part of the vocabulary, and why they are refused.
TRUNCATED_SAMPLING = ("top_p", "top_k", "min_p")
WHOLE_VOCABULARY = (
    "to train, sample from the whole vocabulary, because the trainer's log-probs are of it"
)


@dataclass
class ServerConfig:
    """The SGLang servers."""

    count: int = setting(1, "Number of servers.", within=(1, 1024))
    device: str = setting(
        "auto",
        "Where to compute. auto is cuda if the machine has a GPU, else cpu.",
        choices=("auto", "cpu", "cuda"),
    )
    tensor_parallel: int = setting(1, "GPUs of each server.", within=(1, 1024))
    host: str = setting(
        "127.0.0.1",
        "Address to listen on, at free ports. `node`: this machine's own, for several machines.",
    )
    api_key: str | None = setting(None, "Required unless server.host is a loopback address.")
    deterministic: bool = setting(
        False,
        "Give a request the same tokens whatever else the server runs, and on every server. With "
        "schedule=sync a run can then be repeated and resumed bit for bit.",
    )
    start_timeout_s: float = setting(
        600.0, "Longest time that a server may take to start, in seconds.", within=SECONDS
    )
    args: dict[str, Any] = setting(
        {},
        "Options of SGLang: {chunked_prefill_size: 2048} is --chunked-prefill-size 2048. dtype is "
        "bfloat16 on a GPU and float32 without one. max_running_requests is a server's share of "
        "rollout.max_concurrent and a quarter more; without a GPU, what keeps a core busy.",
    )

    @property
    def mem_fraction(self) -> float | None:
        """Return the share of a GPU's memory for weights and KV cache; None: SGLang decides."""
        return self.args.get("mem_fraction_static")

    @property
    def max_running_requests(self) -> int | None:
        """Return the requests that a server runs at a time; None: not set."""
        return self.args.get("max_running_requests")

    @property
    def takes_turns(self) -> bool:
        """Return whether servers leave their GPUs to the trainer in its steps."""
        return bool(self.args.get("enable_memory_saver"))


@dataclass
class SyncConfig:
    """The pushes of new weights to the servers."""

    every: int = setting(
        1,
        "Training steps from push to push, N. Needs buffer.max_staleness of at least N - 1.",
        within=(1, MAX_COUNT),
    )
    transport: str = setting(
        "auto",
        "distributed: an NCCL or Gloo broadcast. adapters: a broadcast of the adapters of "
        "trainer.lora alone, which each server adds to the weights of its checkpoint. delta: a "
        "broadcast of what changed since the last push, for slow networks. memory: "
        "memory that trainer and servers share, without GPUs. disk: files in a folder. auto: "
        "memory without GPUs, else distributed.",
        choices=("auto", "distributed", "adapters", "delta", "memory", "disk"),
    )
    disk_path: str | None = setting(
        None, "disk: a folder that the servers see too. null: RUN_DIR/weights."
    )
    verify: bool = setting(
        False, "Read some weights back from the servers after each push and compare them."
    )
    timeout_s: float = setting(
        120.0,
        "Longest wait for an answer from a server or the controller, in seconds. A server that "
        "is silent for half of it outside a push has failed.",
        within=SECONDS,
    )

    @property
    def health_timeout_s(self) -> float:
        """Return the seconds of silence after which a server has failed."""
        return self.timeout_s / 2

    @property
    def health_interval_s(self) -> float:
        """Return the seconds between two health checks of a server."""
        return self.timeout_s / 12


@dataclass
class RestartConfig:
    """Restarts of servers, controller and trainer during a run, after a failure or a hang."""

    max: int = setting(
        5,
        "Most restarts within an hour. After that the run goes on without the server, or ends, and "
        "resume=auto continues it. 0: nothing is restarted.",
        within=(0, 1_000_000),
    )
    hang_timeout_s: float = setting(
        1800.0,
        "A process without a heartbeat for this many seconds counts as hung and is replaced. This "
        "must exceed sync.timeout_s, a microbatch, loading the model, and writing a checkpoint.",
        within=(1, WEEK_S),
    )


@dataclass
class Sampling:
    """Sampling of completions."""

    temperature: float = setting(1.0, "Sampling temperature. 0: greedy.", within=(0, 100))
    top_p: float = setting(
        1.0, "Sample from the likeliest tokens whose probabilities sum to this.", within=(1e-6, 1)
    )
    top_k: int = setting(
        0, "Sample from this many of the likeliest tokens. 0 or -1: all.", within=(-1, MAX_COUNT)
    )
    max_new_tokens: int = setting(1024, "Longest answer, in tokens.", within=(1, MAX_TOKENS))
    stop: list[Any] = setting([], "Texts and token ids at which an answer ends.")


@dataclass
class RolloutConfig:
    """Generation: how prompts become trajectories."""

    group_size: int = setting(8, "Trajectories of each prompt, G.", within=(1, 10_000))
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", within=(1, MAX_TOKENS))
    temperature: float = setting(1.0, "Sampling temperature. eval: 0 is greedy.", within=(0, 100))
    stop: list[Any] = setting(
        [],
        "Texts and token ids at which an answer ends, besides the model's own; see "
        "docs/workflows.md.",
    )
    workflow: str = setting(
        "areal_lite.rollout.episode:single_turn",
        "module:name of the function or class that plays an episode; see docs/workflows.md.",
    )
    workflow_args: dict[str, Any] = setting(
        {}, "Arguments of a workflow that is a class: rollout.workflow_args.KEY=VALUE."
    )
    workers: int | None = setting(
        None,
        "Processes that run a workflow, its tools and agents, and filters and data of your own. "
        "null: by the number of cores.",
        within=(1, 1024),
    )
    episode_timeout_s: float = setting(
        1800.0, "Longest time of an episode's code, not of servers, in seconds.", within=SECONDS
    )
    interrupt: str = setting(
        "in_place",
        "What a push does to running requests. in_place: pause them and keep their KV cache. "
        "retract: pause them and compute their KV cache again. abort: end them and continue them "
        "with new requests. none: wait until they have finished.",
        choices=("in_place", "retract", "abort", "none"),
    )
    max_concurrent: int = setting(
        256, "Trajectories in flight, over all servers.", within=(1, 1_000_000)
    )
    filters: list[str] = setting(
        [],
        "Groups to replace until batches are full. zero_variance: groups whose trajectories all "
        "have one reward. module:function: f(group) is None, or a short reason to replace it.",
    )
    retire_above: float | None = setting(
        None,
        "Stop asking a prompt once more than this share of its latest trajectories solve it.",
        within=(0, 0.999),
    )
    rest_unsolved: int = setting(
        0,
        "Longest rest, in epochs, of a prompt that no trajectory of its group solved. 0: no rest.",
        within=(0, 64),
    )

    @property
    def sampling(self) -> Sampling:
        """Return how training samples: from the whole vocabulary."""
        return Sampling(self.temperature, max_new_tokens=self.max_new_tokens, stop=self.stop)


@dataclass
class ReplayConfig:
    """The replay buffer: batches from trajectories of all versions. Needs algo.loss=tb."""

    capacity: int = setting(
        0, "Trajectories kept of each prompt. 0: no replay.", within=(0, 1_000_000)
    )
    recency_probability: float = setting(
        0.5,
        "Probability that a group of the batch is the newest one, not one drawn from all.",
        within=(0, 1),
    )


@dataclass
class BufferConfig:
    """The buffer: how stale a trajectory may be when it is trained on."""

    max_staleness: int = setting(
        4,
        "Largest staleness of a token, in steps (eta). Staler ones are masked. 0: generation and "
        "training take turns.",
        within=(0, MAX_COUNT),
    )
    freshness: str = setting(
        "auto",
        "How far generation runs ahead within that bound. auto: just far enough that the trainer "
        "does not wait. eager, and always with a window: up to the bound.",
        choices=("auto", "eager"),
    )
    window: int | None = setting(
        None,
        "How many younger groups may overtake a group that still runs before the next batch waits "
        "for it. 0: first in, first out. null: no limit.",
        within=(0, MAX_COUNT),
    )
    replay: ReplayConfig = field(default_factory=ReplayConfig)


@dataclass
class StoreConfig:
    """The store: every rollout group and trajectory of a run, in trajectories.sqlite."""

    max_gib: float | None = setting(
        50.0,
        "Largest size of the file. Beyond it, the oldest groups lose their tokens, log-probs and "
        "texts, except what a resume or a replay buffer needs. null: no limit.",
        within=(0.001, 1_000_000),
    )


@dataclass
class LoraConfig:
    """Low-rank adapters, which are trained in place of the model's own weights."""

    rank: int = setting(
        0, "Rank of the adapters. 0: no adapters, all weights are trained.", within=(0, 1024)
    )
    alpha: float = setting(
        32.0, "The output of an adapter is multiplied by alpha / rank.", within=(1e-6, 1e6)
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

    steps: int = setting(100, "Training steps of the run.", within=(1, 10_000_000))
    batch_groups: int = setting(32, "Groups of a training step, B.", within=(1, 1_000_000))
    minibatches: int = setting(1, "Optimizer updates of a training step, M.", within=(1, 1_000_000))
    tokens_per_microbatch: int = setting(
        8192, "Tokens of one forward and backward pass.", within=(1, MAX_TOKENS)
    )
    share_prefixes: bool = setting(
        True, "Compute a prefix only once if several sequences of a microbatch share it."
    )
    tensor_parallel: int = setting(
        1, "Ranks that share each matrix, and the tokens between the matrices.", within=(1, 1024)
    )
    pipeline_parallel: int = setting(1, "Ranks that share the layers.", within=(1, 1024))
    virtual_pipeline: int = setting(
        1, "Chunks of layers of each pipeline stage, interleaved.", within=(1, 1024)
    )
    context_parallel: int = setting(1, "Ranks that share each sequence.", within=(1, 1024))
    expert_parallel: int = setting(
        1,
        "Ranks that share the experts, among the tensor-, context- and data-parallel ones.",
        within=(1, 1024),
    )
    data_parallel: int = setting(
        1, "Replicas of the ranks above, each with its own shard of the batch.", within=(1, 1024)
    )
    recompute: str = setting(
        "none",
        "What the backward pass recomputes: nothing, the activations of attention (selective), "
        "or all activations of a layer (full).",
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
        "adam is AdamW. muon makes the updates of matrices orthogonal. sgd has no momentum and "
        "does not rescale the gradient. With these two, each data-parallel rank holds all state.",
        choices=("adam", "muon", "sgd"),
    )
    lr: float = setting(1e-4, "Learning rate.", within=(1e-12, 1))
    lr_schedule: str = setting(
        "constant",
        "Learning rate after the warm-up. wsd: constant, with a linear decay in the last fifth.",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    lr_warmup_steps: int = setting(
        0,
        "Updates of the linear warm-up; a step has trainer.minibatches of them.",
        within=(0, MAX_COUNT),
    )
    min_lr: float = setting(0.0, "Learning rate at the end of the decay.", within=(0, 1))
    adam_beta2: float = setting(0.95, "Decay of Adam's second moment.", within=(0, 0.999999))
    adam_eps: float = setting(1e-8, "Adam's epsilon.", within=(1e-20, 1))
    weight_decay: float = setting(0.0, "Decoupled weight decay.", within=(0, 100))
    clip_grad: float = setting(
        1.0, "Largest norm of the gradient. 0: not clipped.", within=(0, 1e6)
    )
    save_every: int = setting(
        0,
        "Steps between checkpoints. 0: one every half hour. The last step always has one.",
        within=(0, MAX_COUNT),
    )
    keep_checkpoints: int = setting(2, "Newest checkpoints to keep. 0: all.", within=(0, 1_000_000))
    offload: bool = setting(
        False, "Move Adam moments and gradient buffers off the GPU between training steps."
    )
    gpu_memory_fraction: float | None = setting(
        None,
        "Share of the GPU's memory for a rank, when a server shares its GPU. null: all.",
        within=(0.001, 1),
    )

    @property
    def world_size(self) -> int:
        """Return the number of trainer ranks."""
        model_ranks = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        return model_ranks * self.data_parallel


@dataclass
class LoggerConfig:
    """The training log in trackers, besides metrics.jsonl."""

    trackers: list[str] = setting(
        [], "wandb, tensorboard, mlflow, trackio, swanlab, or module:Class, any number of them."
    )
    args: dict[str, Any] = setting(
        {}, "Arguments by tracker, such as logger.args.wandb.mode=offline."
    )
