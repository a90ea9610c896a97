"""The work of a simulated run: lengths of completions, and speeds from the data sheets of GPUs.

A decoding step reads the weights once and the KV cache of every sequence, and computes 2 N
operations for each sequence of a model with N parameters. Training computes 6 N operations for a
token, 2 N more when whole layers are recomputed, and 2 N more where the proximal policy has a
forward pass of its own (`AlgoConfig.prox_pass`). Attention adds 4 operations for each layer, hidden
unit and earlier token to a forward pass, and twice that to a backward pass.
`simulate.bandwidth_share` and `simulate.arithmetic_share` are what is reached in practice.
Communication between the GPUs of a server or of a rank is not modelled.

Bandwidth (bytes/s), dense bfloat16 arithmetic (operations/s) and memory (bytes) are from NVIDIA's
data sheets of the SXM modules. An H800 is an H100 with less NVLink.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np

from areal_lite.data.model_folder import num_experts
from areal_lite.tools.commands import SimulateConfig
from areal_lite.tools.simulate.decoding import ServerSpeed

_NORMAL = NormalDist()
_BYTES = 2  # of a parameter and of an entry of the KV cache
_MEMORY_SHARE = 0.88  # of the memory, for weights and KV cache
_PREFILL_PASSES = 2  # operations for a parameter and token of a prompt


class Lengths(Protocol):
    """Draws the lengths of a group, in tokens."""

    def group(self, seed: int, prompt: int, size: int) -> np.ndarray:
        """Return the lengths of `size` completions of a prompt, int64 [size], the same each time.

        A prompt that is asked again therefore gets as long an answer.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths:
    """Log-normal lengths that are cut at `longest` and then have the given mean."""

    mean: float  # mean length in tokens, after the cut
    spread: float  # standard deviation of the logarithm, before the cut
    longest: int  # the cut, in tokens
    shared: float = 0.5  # the prompt's share of the variance of the logarithm, 0 to 1

    def __post_init__(self) -> None:
        if self.mean >= self.longest:
            raise ValueError(
                f"simulate.length_mean={self.mean:g} must be below "
                f"rollout.max_new_tokens={self.longest}"
            )

    @cached_property
    def location(self) -> float:
        """Return the mean of the logarithm before the cut, by bisection."""
        low, high = math.log(self.mean) - self.spread**2 - 1, math.log(self.longest) + 20
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return low

    def _cut_mean(self, location: float) -> float:
        """Return E[min(X, longest)] of a log-normal X."""
        if not self.spread:
            return min(math.exp(location), self.longest)
        edge = (math.log(self.longest) - location) / self.spread
        below = math.exp(location + self.spread**2 / 2) * _NORMAL.cdf(edge - self.spread)
        return below + self.longest * (1 - _NORMAL.cdf(edge))

    def group(self, seed: int, prompt: int, size: int) -> np.ndarray:
        rng = np.random.default_rng((seed, prompt))
        common, own = rng.normal(), rng.normal(size=size)
        parts = math.sqrt(self.shared) * common + math.sqrt(1 - self.shared) * own
        lengths = np.exp(self.location + self.spread * parts)
        return lengths.round().clip(1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class RecordedLengths:
    """The groups of a stored run, drawn with repetition."""

    groups: Sequence[Sequence[int]]

    def group(self, seed: int, prompt: int, size: int) -> np.ndarray:
        rng = np.random.default_rng((seed, prompt))
        lengths = self.groups[int(rng.integers(len(self.groups)))]
        if len(lengths) == size:
            return np.asarray(lengths, np.int64)
        return rng.choice(np.asarray(lengths, np.int64), size)


@dataclass(frozen=True, kw_only=True)
class TrainerSpeed:
    """The time of a training step and of a push."""

    fixed_s: float = 0.0  # seconds of a step, apart from the terms below
    per_token_s: float  # seconds for each token of the largest shard
    per_square_s: float = 0.0  # seconds for the square of each sequence's length: attention
    prepare_s: float = 0.0  # seconds of a push before its pause
    pause_s: float = 0.0  # seconds in which the servers are paused

    def step_s(self, shards: list[np.ndarray]) -> float:
        """Return the seconds of a step; a shard is the lengths of its sequences, in tokens."""
        squares = (float(np.square(lengths, dtype=np.float64).sum()) for lengths in shards)
        tokens = (float(lengths.sum()) for lengths in shards)
        slowest = max(
            self.per_token_s * count + self.per_square_s * square
            for count, square in zip(tokens, squares)
        )
        return self.fixed_s + slowest


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Servers that are lost after the warm-up."""

    servers: int  # how many
    after_s: float  # seconds after the warm-up
    return_s: float | None = None  # seconds until they are up again; None: they stay away


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The lengths, speeds and failures of a simulated run."""

    lengths: Lengths  # draws the lengths of completions, in tokens
    # server, trainer: how fast they are
    server: ServerSpeed
    trainer: TrainerSpeed
    prompt_tokens: int = 1  # length of a prompt
    # whether the requests of a group share the computation of their prompt
    share_prompts: bool = True
    uniform_share: float = 0.0  # share of the groups whose rewards are all equal
    reward_s: float = 0.0  # seconds until a completion has its reward
    warm_up: int = 5  # steps before the measured ones
    steps: int = 20  # measured steps
    grain: int = 1  # tokens that a simulated token stands for
    loss: Loss | None = None  # servers that are lost


@dataclass(frozen=True)
class Gpu:
    """A GPU: bytes/s, operations/s and bytes."""

    bandwidth: float
    arithmetic: float
    memory: float


GPUS = {
    "a100": Gpu(2.039e12, 312e12, 80e9),
    "h100": Gpu(3.35e12, 989e12, 80e9),
    "h800": Gpu(3.35e12, 989e12, 80e9),
    "h200": Gpu(4.8e12, 989e12, 141e9),
    "b200": Gpu(8.0e12, 2250e12, 180e9),
}


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder."""

    parameters: float
    active: float  # parameters that a token uses
    layers: int
    hidden: int
    kv_size: int  # heads of keys and values times their size

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of a token in the KV cache."""
        return 2 * _BYTES * self.layers * self.kv_size


# From the config.json of the models. The windows of Olmo 3 are not modelled: at 14,600 tokens its
# layers hold about 0.45 of what full attention would, and `kv_size` is that share of 4096.
SHAPES = {
    "qwen2.5-1.5b": Shape(1.54e9, 1.54e9, 28, 1536, 256),
    "qwen2.5-7b": Shape(7.62e9, 7.62e9, 28, 3584, 512),
    "qwen2.5-14b": Shape(14.77e9, 14.77e9, 48, 5120, 1024),
    "qwen2.5-32b": Shape(32.76e9, 32.76e9, 64, 5120, 1024),
    "olmo3-7b": Shape(7.3e9, 7.3e9, 32, 4096, 1843),
}


def read_shape(folder: Path) -> Shape:
    """Return the shape of the model in `folder`. Raises ValueError for a file that has none."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
        hidden, layers = values["hidden_size"], values["num_hidden_layers"]
        heads = values["num_attention_heads"]
        kv_heads = values.get("num_key_value_heads") or heads
        head_dim = values.get("head_dim") or hidden // heads
        experts = num_experts(values) or 1
        used = values.get("num_experts_per_tok") or 1
        mlp = values.get("moe_intermediate_size") or values["intermediate_size"]
        embeddings = values["vocab_size"] * hidden
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not describe a model: {error!r}; set simulate.shape"
        ) from None
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    expert = 3 * hidden * mlp
    embeddings *= 1 if values.get("tie_word_embeddings") else 2
    return Shape(
        parameters=embeddings + layers * (attention + experts * expert),
        active=embeddings + layers * (attention + used * expert),
        layers=layers,
        hidden=hidden,
        kv_size=kv_heads * head_dim,
    )


def chosen_shape(config: SimulateConfig) -> Shape:
    """Return the shape that the settings name."""
    if config.model is None:
        return SHAPES[config.simulate.shape]
    return read_shape(Path(config.model))


def server_speed(config: SimulateConfig) -> ServerSpeed:
    """Return the speed of a server. Raises ValueError if the weights do not fit its GPUs."""
    gpu, shape, simulation = GPUS[config.simulate.gpu], chosen_shape(config), config.simulate
    gpus = config.server.tensor_parallel
    bandwidth = gpus * gpu.bandwidth * simulation.bandwidth_share
    arithmetic = gpus * gpu.arithmetic * simulation.arithmetic_share
    share = config.server.mem_fraction or _MEMORY_SHARE
    free = gpus * gpu.memory * share - _BYTES * shape.parameters
    if free <= 0:
        raise ValueError(
            f"server.tensor_parallel={gpus}: {_BYTES * shape.parameters / 1e9:.0f} GB of weights "
            f"do not fit {gpus} x {simulation.gpu}: raise it"
        )
    return ServerSpeed(
        step_s=simulation.host_ms / 1e3 + _BYTES * shape.active / bandwidth,
        per_sequence_s=2 * shape.active / arithmetic,
        per_context_s=shape.kv_bytes / bandwidth,
        prefill_s=_PREFILL_PASSES * shape.active / arithmetic,
        kv_tokens=config.server.args.get("max_total_tokens", free / shape.kv_bytes),
        max_running=config.server.max_running_requests or 2**31,
    )


def trainer_speed(config: SimulateConfig) -> TrainerSpeed:
    """Return the speed of a data-parallel rank, which has several GPUs."""
    gpu, shape, simulation = GPUS[config.simulate.gpu], chosen_shape(config), config.simulate
    trainer = config.trainer
    gpus = trainer.world_size // trainer.data_parallel
    arithmetic = gpus * gpu.arithmetic * simulation.arithmetic_share
    # Frozen weights have no gradient, which would cost as much as a forward pass.
    forwards = 3 - (trainer.lora.rank > 0)
    forwards += trainer.recompute == "full"
    proximal = {"all": 1.0, "rest": 1 - 1 / trainer.minibatches, "none": 0.0}
    forwards += proximal[config.algo.prox_pass]
    push_s = _BYTES * shape.parameters / (1e9 * simulation.push_gb_s)
    return TrainerSpeed(
        fixed_s=simulation.step_fixed_s,
        per_token_s=2 * shape.active * forwards / arithmetic,
        # Each of n tokens attends to n / 2 on average.
        per_square_s=4 * shape.layers * shape.hidden * forwards / 2 / arithmetic,
        pause_s=simulation.push_fixed_s + push_s,
    )
