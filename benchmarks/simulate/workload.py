"""The work of a simulated run: lengths of completions, and speeds of servers and trainer.

A decoding step reads the weights once and the KV cache of every sequence, and computes 2 N
operations for each sequence of a model with N parameters. Training computes 6 N operations for a
token, 2 N more when whole layers are recomputed, and 2 N more where the proximal policy has a
forward pass of its own (`AlgoConfig.prox_pass`). Attention adds 4 operations for each layer, hidden
unit and earlier token to a forward pass, and twice that to a backward pass.
`simulate.bandwidth_share` and `simulate.arithmetic_share` are what is reached in practice.
Communication between the GPUs of a server or of a rank is not modelled.

Bandwidth (bytes/s), dense bfloat16 arithmetic (operations/s) and memory (bytes) are from NVIDIA's
data sheets of the SXM modules. An H800 is an H100 with less NVLink.

Or lengths and speeds are measured in the run directory of a run, without its first steps:

* A server: while b requests are in flight on it, a decoding step takes step_s + per_sequence_s * b.
  Each request that begins holds all up for request_s. A trajectory that spent t_b seconds with b in
  flight, in which m_b requests began, has as many tokens as the sum over b of
  (t_b - request_s * m_b) / (step_s + per_sequence_s * b). Least squares over all trajectories.
* The trainer: means of seconds per token, of a push before and in its pause, and of what is left of
  a step. The time in which a push waits for requests is left out: the simulation has its own.
* Lengths: the stored groups, and the mean prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import numpy as np
from scipy.optimize import least_squares, root_scalar

from areal_lite.config import TrainerConfig, load_config
from areal_lite.data.model_folder import num_experts
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.tools.report.run_data import Columns, read_columns
from benchmarks.simulate.decoding import ServerSpeed
from benchmarks.simulate.settings import SimulateConfig

_NORMAL = NormalDist()
_BYTES = 2  # of a parameter and of an entry of the KV cache
_MEMORY_SHARE = 0.88  # of the memory, for weights and KV cache
_MOMENT_BYTES = 8  # of a parameter, spread over the ranks
_HOST_BYTES_S = 25e9  # from and to page-locked host memory over PCIe 4.0: 80 % of its 32 GB/s
_PREFILL_PASSES = 2  # operations for a parameter and token of a prompt


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
        """Return the mean of the logarithm before the cut."""
        low = math.log(self.mean) - self.spread**2 - 1
        high = math.log(self.longest) + 20 * (1 + self.spread)
        return root_scalar(lambda x: self._cut_mean(x) - self.mean, bracket=(low, high)).root

    def _cut_mean(self, location: float) -> float:
        """Return E[min(X, longest)] of a log-normal X."""
        if not self.spread:
            return min(math.exp(location), self.longest)
        edge = (math.log(self.longest) - location) / self.spread
        below = math.exp(location + self.spread**2 / 2) * _NORMAL.cdf(edge - self.spread)
        return below + self.longest * (1 - _NORMAL.cdf(edge))

    def group(self, seed: int, prompt: int, size: int) -> np.ndarray:
        """Return the lengths of `size` completions of a prompt, int64 [size], the same each time.

        A prompt that is asked again therefore gets as long an answer.
        """
        rng = np.random.default_rng((seed, prompt))
        common, own = rng.normal(), rng.normal(size=size)
        parts = math.sqrt(self.shared) * common + math.sqrt(1 - self.shared) * own
        lengths = np.exp(self.location + self.spread * parts)
        return lengths.round().clip(1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class RecordedLengths:
    """The groups of a stored run, drawn with repetition."""

    groups: Sequence[Sequence[int] | np.ndarray]

    def group(self, seed: int, prompt: int, size: int) -> np.ndarray:
        rng = np.random.default_rng((seed, prompt))
        lengths = self.groups[int(rng.integers(len(self.groups)))]
        if len(lengths) == size:
            return np.asarray(lengths, np.int64)
        return rng.choice(np.asarray(lengths, np.int64), size)


Lengths = LogNormalLengths | RecordedLengths
"""Draws the lengths of a group, in tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpeed:
    """The time of a training step and of a push."""

    fixed_s: float = 0.0  # seconds of a step, apart from the terms below
    per_token_s: float  # seconds for each token of the largest shard
    per_square_s: float = 0.0  # seconds for the square of each sequence's length: attention
    prepare_s: float = 0.0  # seconds of a push before its pause
    pause_s: float = 0.0  # seconds in which the servers are paused
    turn_s: float = 0.0  # seconds in which a trainer comes to GPUs that servers use, and leaves

    def step_s(self, shards: list[np.ndarray]) -> float:
        """Return the seconds of a step; a shard is the lengths of its sequences, in tokens."""
        sums = ((n.sum(), np.square(n, dtype=np.float64).sum()) for n in shards)
        slowest = max(self.per_token_s * n + self.per_square_s * square for n, square in sums)
        return self.fixed_s + float(slowest)


@dataclass(frozen=True)
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
    kv_size: float  # heads of keys times their size, the mean of all layers

    @property
    def kv_bytes(self) -> float:
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


def read_shape(folder: str) -> Shape:
    """Return the shape of the model in `folder`. Raises ValueError if no run can train it."""
    # torch and transformers are slow to import.
    from areal_lite.megatron.architectures import check_supported
    from areal_lite.tools.dry_run import read_config
    from areal_lite.tools.memory import kv_bytes_per_token, parameter_sizes

    hf = read_config(folder)
    check_supported(hf, TrainerConfig())
    experts = num_experts(vars(hf))
    used = hf.num_experts_per_tok / experts if experts else 1.0
    sizes = list(parameter_sizes(hf))
    return Shape(
        parameters=sum(size for _, size in sizes),
        active=sum(size * (used if ".local_experts." in name else 1.0) for name, size in sizes),
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        kv_size=kv_bytes_per_token(hf, 1, 1) / (2 * hf.num_hidden_layers),
    )


def chosen_shape(config: SimulateConfig) -> Shape:
    """Return the shape that the settings name."""
    if config.model is None:
        return SHAPES[config.simulate.shape]
    return read_shape(config.model)


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
        kv_tokens=config.server.args.get("max_total_tokens") or free / shape.kv_bytes,
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
        turn_s=2 * _MOMENT_BYTES * shape.parameters / trainer.world_size / _HOST_BYTES_S,
    )


# Steps that are left out.
_WARM_UP = 3
# The fit and the queue follow from each other: repeat both this often.
_ROUNDS = 4
# step_s, per_sequence_s and request_s: where a fit begins, the least and the most.
_FIRST_GUESS = np.array([3e-3, 3e-5, 1e-3])
_BOUNDS = ([1e-5, 0.0, 0.0], [10.0, 1.0, 10.0])


def measured_workload(run_dir: Path, warm_up: int, steps: int) -> Workload:
    """Return the workload of the run in `run_dir`. Raises ValueError if it has too few steps."""
    config = load_config(run_dir)
    records = read_metrics(run_dir)[_WARM_UP:]
    columns = read_columns(run_dir / STORE_FILE)
    late = columns.started >= (records[0]["logged_at"] if records else math.inf)
    if len(records) < 5 or not late.any():
        raise ValueError(
            f"simulate.measured_run={run_dir}: {len(records)} steps after the first {_WARM_UP}, at "
            f"least 5 are needed, and {late.sum():,} trajectories began after them"
        )
    prompt_tokens = float(columns.prompt[late].mean())
    of_groups = np.split(columns.sampled[late], np.flatnonzero(np.diff(columns.group[late])) + 1)
    return Workload(
        lengths=RecordedLengths(of_groups),
        server=fit_server(columns, fitted=late),
        trainer=_trainer_speed(records, prompt_tokens, config.trainer.data_parallel),
        prompt_tokens=round(prompt_tokens),
        warm_up=warm_up,
        steps=steps,
    )


def fit_server(columns: Columns, fitted: np.ndarray) -> ServerSpeed:
    """Fit the speed of the servers to the trajectories in `fitted`, bool [n].

    All n were in flight with them.
    """
    started, finished, tokens = columns.started, columns.finished, columns.sampled
    owns = [columns.server == name for name in np.unique(columns.server)]
    speed = _FIRST_GUESS
    for _ in range(_ROUNDS):
        begins = [_begins(started[own], speed[2]) for own in owns]

        def surplus(speed: np.ndarray, begins: list[np.ndarray] = begins) -> np.ndarray:
            """Return how many tokens more than its own each trajectory would have."""
            steps = (_steps(speed, started[o], finished[o], b) for o, b in zip(owns, begins))
            return np.concatenate([(s - tokens[o])[fitted[o]] for s, o in zip(steps, owns)])

        speed = least_squares(surplus, speed, bounds=_BOUNDS, x_scale=_FIRST_GUESS).x
    step_s, per_sequence_s, request_s = speed.tolist()
    return ServerSpeed(step_s=step_s, per_sequence_s=per_sequence_s, request_s=request_s)


def _begins(started: np.ndarray, request_s: float) -> np.ndarray:
    """Return when the requests of a server begin, in order.

    They begin one after the other. Each takes `request_s`, so they queue when many arrive.
    """
    places = request_s * np.arange(len(started))
    return np.maximum.accumulate(np.sort(started) - places) + places + request_s


def _steps(
    speed: np.ndarray, started: np.ndarray, finished: np.ndarray, begins: np.ndarray
) -> np.ndarray:
    """Return the decoding steps of a server during each of its trajectories."""
    step_s, per_sequence_s, request_s = speed
    times = np.concatenate((started, finished))
    order = np.argsort(times, kind="stable")
    times, in_flight = times[order], np.cumsum(np.repeat([1, -1], len(started))[order])
    step = step_s + per_sequence_s * in_flight
    busy_s = np.diff(times) * (in_flight[:-1] > 0)
    until = np.concatenate(([0.0], np.cumsum(busy_s / step[:-1])))
    held_up = request_s / step[np.searchsorted(times, begins, "right") - 1]
    held_up_until = np.concatenate(([0.0], np.cumsum(held_up)))

    def passed(at: np.ndarray, side: Literal["left", "right"]) -> np.ndarray:
        return np.interp(at, times, until) - held_up_until[np.searchsorted(begins, at, side)]

    return passed(finished, "right") - passed(started, "left")


def _trainer_speed(records: list[dict], prompt_tokens: float, ranks: int) -> TrainerSpeed:
    """Average the parts of a step. What is neither waiting nor a push nor training is fixed."""
    steps = len(records) - 1
    # Not by `logged_at`: between two starts of a run is a time that belongs to no step.
    keys = ("time_s", "wait_s", "train_s", "push_s", "pause_s", "drain_s", "tokens", "trajectories")
    seconds, wait_s, train_s, push_s, pause_s, drain_s, tokens, trajectories = (
        sum(record.get(key) or 0.0 for record in records[1:]) for key in keys
    )
    pushes = max(1, sum(record["pause_s"] is not None for record in records[1:]))
    return TrainerSpeed(
        fixed_s=max(0.0, seconds - wait_s - train_s - push_s) / steps,
        per_token_s=train_s * ranks / (tokens + prompt_tokens * trajectories),
        prepare_s=max(0.0, push_s - pause_s - drain_s) / pushes,
        pause_s=pause_s / pushes,
    )
