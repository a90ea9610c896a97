"""Settings of generation, of the buffer between generation and training, and of the store."""

from dataclasses import dataclass, field
from typing import Any

from areal_lite.config.fields import MAX_COUNT, MAX_TOKENS, setting

WHOLE_VOCABULARY = (
    "tokens must be sampled from the whole vocabulary, because the trainer's log-probs are of it"
)
"""Why the settings in TRUNCATED_SAMPLING are refused."""

MAX_PROMPTS = 10_000
"""Prompts that a replay buffer keeps."""

TRUNCATED_SAMPLING = ("top_p", "top_k", "min_p")
"""Settings of other systems that sample from a part of the vocabulary."""


@dataclass
class RolloutConfig:
    """Generation: how prompts become trajectories."""

    group_size: int = setting(8, "Trajectories of each prompt, G.", minimum=1, maximum=10_000)
    max_new_tokens: int = setting(
        512, "Longest completion, in tokens.", minimum=1, maximum=MAX_TOKENS
    )
    temperature: float = setting(
        1.0,
        "Sampling temperature. Evaluation adds a greedy completion.",
        minimum=0.001,
        maximum=100,
    )
    workflow: str = setting(
        "areal_lite.rollout.workflows.single_turn:single_turn",
        "module:name of the function or class that plays an episode; see docs/workflows.md.",
    )
    workflow_args: dict[str, Any] = setting(
        {}, "Arguments of a workflow that is a class: rollout.workflow_args.KEY=VALUE."
    )
    interrupt: str = setting(
        "in_place",
        "What a push does to running requests. in_place: pause them and keep their KV cache. "
        "retract: pause them and compute their KV cache again. abort: end them and continue them "
        "with new requests. none: wait until they have finished.",
        choices=("in_place", "retract", "abort", "none"),
    )
    max_concurrent: int = setting(
        256, "Trajectories in flight, over all servers.", minimum=1, maximum=1_000_000
    )
    filters: list[str] = setting(
        [],
        "Groups to replace, until batches are full. zero_variance: those whose trajectories all "
        "got the same reward. module:function: f(group) is None, or a short reason to replace it.",
    )
    retire_above: float | None = setting(
        None,
        "Stop asking a prompt once more than this share of its latest trajectories solve it.",
        minimum=0,
        below=1,
    )
    rest_unsolved: int = setting(
        0,
        "Longest rest, in epochs, of a prompt that no trajectory of its group solved. 0: no rest.",
        minimum=0,
        maximum=64,
    )


@dataclass
class ReplayConfig:
    """The replay buffer: batches from trajectories of all versions. Needs algo.loss=tb."""

    capacity: int = setting(
        0, "Trajectories kept of each prompt. 0: no replay.", minimum=0, maximum=1_000_000
    )
    recency_probability: float = setting(
        0.5,
        "Probability that a group of the batch is the newest one. Otherwise it is drawn from all.",
        minimum=0,
        maximum=1,
    )


@dataclass
class BufferConfig:
    """The buffer: how stale a trajectory may be when it is trained on."""

    max_staleness: int = setting(
        4,
        "Largest staleness of a token, in training steps (eta). 0: generation and training take "
        "turns.",
        minimum=0,
        maximum=MAX_COUNT,
    )
    overdue: str = setting(
        "mask",
        "When a batch is made with staler tokens: mask them, or drop the group and ask its "
        "prompt again.",
        choices=("mask", "drop"),
    )
    window: int | None = setting(
        None,
        "How many younger groups may pass a group that still runs. The next batch then waits for "
        "it, so no token is overdue. 0: first in, first out. null: no limit.",
        minimum=0,
        maximum=MAX_COUNT,
    )
    replay: ReplayConfig = field(default_factory=ReplayConfig)


@dataclass
class StoreConfig:
    """The store: every rollout group and trajectory of a run, in trajectories.sqlite."""

    max_gib: float | None = setting(
        50.0,
        "Largest size of the file. Beyond it, the oldest groups lose their tokens, log-probs and "
        "texts, and their rows stay. Those that were used or that failed come last. What a resume "
        "or a replay buffer needs is kept even so. null: no limit.",
        minimum=0.001,
        maximum=1_000_000,
    )
