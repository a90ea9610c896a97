"""The questions of `simulate.compare`: variants of the settings, each simulated in turn."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from areal_lite.tools.commands import SimulateConfig
from areal_lite.tools.simulate.calibrate import measured_workload
from areal_lite.tools.simulate.run import Summary, simulate, summarize
from areal_lite.tools.simulate.workload import (
    LogNormalLengths,
    Loss,
    Workload,
    server_speed,
    trainer_speed,
)

_TRAINER_SHARES = (0.125, 0.1875, 0.25, 0.375, 0.5)
_STALENESS = (0, 1, 2, 4, 8, 16)
_EVERY = (1, 2, 4, 8)
_GPUS_PER_NODE = 8
_RETURN_S = 300.0
_SCHEDULES = {"sync": (0, "none"), "one_step": (1, "none"), "async": (4, "in_place")}

QUESTIONS = {
    "servers": "GPUs that generate, of all",
    "staleness": "buffer.max_staleness",
    "pushes": "sync.every",
    "schedules": "schedule",
    "loss": f"a node of {_GPUS_PER_NODE} GPUs is lost",
    "scale": "GPUs, with the same batch",
}


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: its name, the settings, the GPUs, and what came out."""

    name: str
    config: SimulateConfig
    summary: Summary

    @property
    def gpus(self) -> int:
        return num_gpus(self.config)


def num_gpus(config: SimulateConfig) -> int:
    """Return the GPUs of servers and trainer together."""
    return config.server.count * config.server.tensor_parallel + config.trainer.world_size


def simulated(config: SimulateConfig, loss: Loss | None = None) -> Summary:
    """Simulate the settings and summarize the run."""
    work = workload(config)
    if loss is not None:
        work = replace(work, loss=loss)
    return summarize(config, work, simulate(config, work))


def compare(question: str, config: SimulateConfig) -> Iterator[Variant]:
    """Simulate the variants that answer a question."""
    if question == "loss":
        yield from _losses(config)
        return
    variants = {
        "servers": _splits,
        "staleness": _bounds,
        "pushes": _cadences,
        "schedules": _schedules,
        "scale": _sizes,
    }[question]
    for name, variant in variants(config):
        yield Variant(name, variant, simulated(variant))


def _splits(config: SimulateConfig) -> Iterator[tuple[str, SimulateConfig]]:
    """Divide the same GPUs between servers and trainer."""
    seen = set()
    for share in _TRAINER_SHARES:
        variant = divided(config, num_gpus(config), share)
        if variant.server.count not in seen and variant.server.count:
            seen.add(variant.server.count)
            generating = variant.server.count * variant.server.tensor_parallel
            yield f"{generating} of {num_gpus(variant)}", variant


def divided(config: SimulateConfig, gpus: int, trainer_share: float) -> SimulateConfig:
    """Return the settings for a number of GPUs, about `trainer_share` of which train.

    The data-parallel ranks divide the batch. What no rank can use generates.
    """
    variant = deepcopy(config)
    trainer, server = variant.trainer, variant.server
    rank_gpus = trainer.world_size // trainer.data_parallel
    wanted = max(1, round(gpus * trainer_share / rank_gpus))
    parts = trainer.batch_groups // trainer.minibatches
    trainer.data_parallel = max(ranks for ranks in range(1, wanted + 1) if parts % ranks == 0)
    server.count = (gpus - trainer.world_size) // server.tensor_parallel
    each = config.rollout.max_concurrent / config.server.count
    size = variant.rollout.group_size
    variant.rollout.max_concurrent = max(size, round(each * server.count))
    return variant


def _bounds(config: SimulateConfig) -> Iterator[tuple[str, SimulateConfig]]:
    for bound in _STALENESS:
        variant = deepcopy(config)
        variant.buffer.max_staleness = bound
        if variant.max_lead >= min(variant.sync.every, variant.trainer.steps) - 1:
            yield str(bound), variant


def _cadences(config: SimulateConfig) -> Iterator[tuple[str, SimulateConfig]]:
    """Push less often, with a bound that is as much larger as tokens get older."""
    spare = config.buffer.max_staleness - config.sync.every + 1
    for every in _EVERY:
        variant = deepcopy(config)
        variant.sync.every = every
        variant.buffer.max_staleness = spare + every - 1
        yield str(every), variant


def _schedules(config: SimulateConfig) -> Iterator[tuple[str, SimulateConfig]]:
    for name, (bound, interrupt) in _SCHEDULES.items():
        variant = deepcopy(config)
        variant.sync.every, variant.buffer.window = 1, None
        variant.buffer.max_staleness, variant.rollout.interrupt = bound, interrupt
        yield name, variant


def _losses(config: SimulateConfig) -> Iterator[Variant]:
    servers = min(max(1, _GPUS_PER_NODE // config.server.tensor_parallel), config.server.count - 1)
    yield Variant("no", config, simulated(config))
    for name, back in ((f"for {_RETURN_S:.0f} s", _RETURN_S), ("for good", None)):
        loss = Loss(servers=servers, after_s=0.0, return_s=back)
        yield Variant(name, config, simulated(config, loss))


def _sizes(config: SimulateConfig) -> Iterator[tuple[str, SimulateConfig]]:
    share = config.trainer.world_size / num_gpus(config)
    for gpus in config.simulate.gpus:
        variant = divided(config, gpus, share)
        if variant.server.count:
            yield str(gpus), variant


_GRAINS = 256


def workload(config: SimulateConfig) -> Workload:
    """Return what `simulate` runs. Raises ValueError for settings that cannot be."""
    simulation = config.simulate
    warm_up = simulation.warm_up
    if warm_up is None:
        warm_up = config.buffer.max_staleness + 2
    if simulation.measured_run is not None:
        return measured_workload(Path(simulation.measured_run), warm_up, simulation.steps)
    longest = config.rollout.max_new_tokens
    return Workload(
        lengths=LogNormalLengths(
            mean=simulation.length_mean,
            spread=simulation.length_spread,
            longest=longest,
        ),
        server=server_speed(config),
        trainer=trainer_speed(config),
        prompt_tokens=simulation.prompt_tokens,
        share_prompts=not config.server.args.get("disable_radix_cache", False),
        uniform_share=simulation.uniform_share,
        reward_s=simulation.reward_s,
        warm_up=warm_up,
        steps=simulation.steps,
        grain=max(1, longest // _GRAINS),
    )


def check_simulation(config: SimulateConfig) -> None:
    """Check what a simulation cannot model. Raises ValueError."""
    if config.buffer.replay.capacity:
        raise ValueError("buffer.replay is not simulated: set buffer.replay.capacity=0")
