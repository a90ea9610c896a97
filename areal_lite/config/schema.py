"""Typed configuration: one dataclass per part of the house, registered with Hydra. Rules that span fields are in areal_lite/launch/preflight.py.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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

    function: str = "areal_lite.quickstart.reward:addition_reward"
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
    workflow: str = (
        "areal_lite.rollout.workflows.single_turn:single_turn"  # module:name, see docs/workflows.md
    )
    workflow_args: dict[str, Any] = field(
        default_factory=dict
    )  # of a workflow that is a class: rollout.workflow_args.key=value
    interrupt: str = "in_place"  # in_place | retract | abort | none (none: a push waits until what is running has finished)
    max_concurrent: int = 256  # trajectories in flight over all servers, at most
    adapt_concurrency: bool = (
        False  # fewer, as many as the servers say that they can run; controller/concurrency.py
    )
    record_text: bool = True  # keep prompt and completion text in the store
    active_sampling: bool = (
        False  # groups whose members all got the same reward are replaced until the batch is full
    )
    filters: list[str] = field(
        default_factory=list
    )  # module:function, f(group) -> None or why it is not trained on; controller/filters.py
    retire_above: float | None = (
        None  # a prompt solved by more than this share of its last groups' trajectories is not asked again
    )


@dataclass
class ReplayConfig:
    """Batches are drawn from a buffer of trajectories of all versions, instead of oldest first; needs algo.loss=tb. controller/replay.py."""

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
