"""Run a simulation: a table, advice in words, comparisons, and the numbers as a file."""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from areal_lite.config.help import show
from areal_lite.system.files import write_atomically
from benchmarks.simulate.run import Summary, simulate, summarize
from benchmarks.simulate.settings import SimulateConfig
from benchmarks.simulate.workload import (
    LogNormalLengths,
    Loss,
    Workload,
    measured_workload,
    server_speed,
    trainer_speed,
)

_TRAINER_SHARES = (0.125, 0.1875, 0.25, 0.375, 0.5)
_STALENESS = (0, 1, 2, 4, 8, 16)
_EVERY = (1, 2, 4, 8)
_GPUS_PER_NODE = 8
_RETURN_S = 300.0
_SCHEDULES = {"sync": (0, "none"), "one_step": (1, "none"), "async": (4, "in_place")}

_GRAINS = 256
# Shares of time from which something is worth a word.
_NOTABLE = 0.1


class Variant(NamedTuple):
    """One row of a comparison: its name, its GPUs, and what came out."""

    name: str
    gpus: int
    summary: Summary


def num_gpus(config: SimulateConfig) -> int:
    """Return the GPUs of servers and trainer together."""
    generating = config.server.count * config.server.tensor_parallel
    training = config.trainer.world_size
    return max(generating, training) if config.server.takes_turns else generating + training


def simulated(config: SimulateConfig, loss: Loss | None = None) -> Summary:
    """Simulate the settings and summarize the run."""
    return summarize(simulate(config, replace(workload(config), loss=loss)))


def compare(question: str, config: SimulateConfig) -> Iterator[Variant]:
    """Simulate the variants that answer a question."""
    _, variants = QUESTIONS[question]
    for name, variant, *loss in variants(config):
        yield Variant(name, num_gpus(variant), simulated(variant, *loss))


def _splits(
    config: SimulateConfig, gpus: int | None = None
) -> Iterator[tuple[str, SimulateConfig]]:
    """Divide the same GPUs between servers and trainer; None: as many as they have."""
    seen = set()
    for share in _TRAINER_SHARES:
        variant = divided(config, gpus or num_gpus(config), share)
        if variant.server.count not in seen and variant.server.count:
            seen.add(variant.server.count)
            generating = variant.server.count * variant.server.tensor_parallel
            yield f"{generating} of {num_gpus(variant)}", variant


def divided(config: SimulateConfig, gpus: int, trainer_share: float) -> SimulateConfig:
    """Return the settings for a number of GPUs, about `trainer_share` of which train.

    The data-parallel ranks divide the batch. What no rank can use generates. In turn, all GPUs do
    both. Too few GPUs leave no server.
    """
    variant = deepcopy(config)
    trainer, server = variant.trainer, variant.server
    rank_gpus = trainer.world_size // trainer.data_parallel
    wanted = max(1, round(gpus * trainer_share / rank_gpus))
    wanted = max(1, gpus // rank_gpus) if server.takes_turns else wanted
    parts = trainer.batch_groups // trainer.minibatches
    trainer.data_parallel = max(ranks for ranks in range(1, wanted + 1) if parts % ranks == 0)
    left = gpus - trainer.world_size
    generating = gpus if server.takes_turns and left >= 0 else max(left, 0)
    server.count = generating // server.tensor_parallel
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
    yield "async, GPUs in turn", _in_turn(config)


def _in_turn(config: SimulateConfig) -> SimulateConfig:
    """Return the settings with which all GPUs generate, and all of them train, in turn."""
    turns = deepcopy(config)
    turns.server.args = config.server.args | {"enable_memory_saver": True}
    variant = divided(turns, num_gpus(config), trainer_share=1.0)
    variant.sync.every, variant.buffer.window = 1, None
    variant.buffer.max_staleness, _ = _SCHEDULES["async"]
    variant.rollout.interrupt = "retract"
    return variant


def _losses(config: SimulateConfig) -> Iterator[tuple[str, SimulateConfig, Loss | None]]:
    servers = min(max(1, _GPUS_PER_NODE // config.server.tensor_parallel), config.server.count - 1)
    yield "0", config, None
    if servers:
        lost = servers * config.server.tensor_parallel
        yield f"{lost} for {_RETURN_S:.0f} s", config, Loss(servers, 0.0, return_s=_RETURN_S)
        yield f"{lost} for good", config, Loss(servers, after_s=0.0)


def _sizes(config: SimulateConfig) -> Iterator[tuple[str, SimulateConfig]]:
    share = config.trainer.world_size / num_gpus(config)
    for gpus in config.simulate.gpus:
        variant = divided(config, gpus, share)
        if variant.server.count:
            yield str(gpus), variant


# What the variants of a comparison differ in, and a function that yields them.
QUESTIONS: dict[str, tuple[str, Callable[[SimulateConfig], Iterable[tuple[Any, ...]]]]] = {
    "servers": ("GPUs that generate, of all", _splits),
    "staleness": ("buffer.max_staleness", _bounds),
    "pushes": ("sync.every", _cadences),
    "schedules": ("schedule", _schedules),
    "loss": (f"GPUs lost with a node of {_GPUS_PER_NODE}", _losses),
    "scale": ("GPUs, with the same batch", _sizes),
}


def workload(config: SimulateConfig) -> Workload:
    """Return what `simulate` runs. Raises ValueError for settings that cannot be."""
    simulation = config.simulate
    warm_up = simulation.warm_up
    if warm_up is None:
        warm_up = config.buffer.max_staleness + 2
    if simulation.measured_run is not None:
        return measured_workload(Path(simulation.measured_run), warm_up, simulation.steps)
    longest, server = config.rollout.max_new_tokens, server_speed(config)
    grain = max(1, longest // _GRAINS)
    sequence = grain * (max(1, round(simulation.prompt_tokens / grain)) - (-longest // grain))
    if sequence > server.kv_tokens:
        raise ValueError(
            f"rollout.max_new_tokens={longest}: a sequence of {sequence:,} tokens does not fit a "
            f"KV cache of {server.kv_tokens:,.0f}: lower it, or raise server.tensor_parallel"
        )
    return Workload(
        lengths=LogNormalLengths(
            mean=simulation.length_mean, spread=simulation.length_spread, longest=longest
        ),
        server=server,
        trainer=trainer_speed(config),
        prompt_tokens=simulation.prompt_tokens,
        share_prompts=not config.server.args.get("disable_radix_cache", False),
        uniform_share=simulation.uniform_share,
        reward_s=simulation.reward_s,
        warm_up=warm_up,
        steps=simulation.steps,
        grain=grain,
    )


def run(config: SimulateConfig) -> int:
    """Simulate the settings and print what came out. Raises ValueError for a bad setting."""
    if config.buffer.replay.capacity:
        raise ValueError("buffer.replay is not simulated: set buffer.replay.capacity=0")
    with _without_log():
        summary = simulated(config)
        print(summary_text(config, summary), flush=True)
        show("\n" + "\n".join(advise(config, summary)), 2, sys.stdout)
        comparisons: dict[str, list[Variant]] = {}
        for question in config.simulate.compare:
            comparisons[question] = variants = list(compare(question, config))
            print("", comparison_text(question, variants), sep="\n")
    if config.simulate.out is not None:
        _write(Path(config.simulate.out), summary, comparisons)
    return 0


@contextmanager
def _without_log() -> Iterator[None]:
    """Log nothing inside the block: servers are lost on purpose."""
    log = logging.getLogger("areal_lite")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _write(path: Path, summary: Summary, comparisons: dict[str, list[Variant]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {
        question: [{"name": v.name, "gpus": v.gpus, **v.summary.as_dict()} for v in variants]
        for question, variants in comparisons.items()
    }
    record = {"run": summary.as_dict(), "comparisons": results}
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    print(f"\nwritten: {path}")


def summary_text(config: SimulateConfig, summary: Summary) -> str:
    """Return the table of one run."""
    generating = config.server.count * config.server.tensor_parallel
    rows = [
        ("GPUs", f"{num_gpus(config)}: {generating} generate, {config.trainer.world_size} train"),
        ("trained tokens a second", f"{summary.tokens_per_s:,.0f}"),
        ("seconds of a step", f"{summary.step_s:,.1f}"),
        (
            "trainer",
            f"trains {summary.train_share:.0%}, waits {summary.wait_share:.0%}, "
            f"pushes {summary.push_share:.0%}",
        ),
        (
            "servers",
            f"decode {summary.decode_share:.0%}, prompts {summary.prefill_share:.0%}, "
            f"idle {summary.idle_share:.0%}, paused {summary.pause_share:.0%}",
        ),
        ("sequences a server decodes", f"{summary.batch:.1f}, {summary.preempted} preempted"),
        ("staleness", f"mean {summary.staleness_mean:.2f}, largest {summary.staleness_max}"),
        ("by staleness from 0", " ".join(f"{share:.0%}" for share in summary.staleness)),
        (
            "trajectories and tokens",
            f"{summary.interrupted_share:.0%} of several versions, "
            f"{summary.masked_share:.1%} of the tokens too stale",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def comparison_text(question: str, variants: Sequence[Variant]) -> str:
    """Return the table of a comparison. `index` is the speed against the first row."""
    if not variants:
        return f"{QUESTIONS[question][0]}: no value is possible with these settings"
    first = variants[0].summary.tokens_per_s
    heads = ("tokens/s", "index", "trainer waits", "servers idle", "staleness")
    cells = [
        (
            f"{v.summary.tokens_per_s:,.0f}",
            f"{v.summary.tokens_per_s / first:.2f}",
            f"{v.summary.wait_share:.0%}",
            f"{v.summary.idle_share:.0%}",
            f"{v.summary.staleness_mean:.2f}",
        )
        for v in variants
    ]
    names = [QUESTIONS[question][0], *(v.name for v in variants)]
    left = max(map(len, names))
    widths = [max(map(len, column)) for column in zip(heads, *cells)]
    lines = [
        f"{name:<{left}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths))
        for name, row in zip(names, [heads, *cells])
    ]
    return "\n".join(lines)


def advise(config: SimulateConfig, summary: Summary) -> list[str]:
    """Say what holds the run back, and which settings to try."""
    advice = []
    if config.server.takes_turns:
        return _advise_on_turns(config, summary)
    if summary.wait_share > _NOTABLE and summary.idle_share > _NOTABLE:
        advice.append(
            f"Trainer and servers wait for each other: the trainer {summary.wait_share:.0%} of its "
            f"time, the servers {summary.idle_share:.0%}. Raise buffer.max_staleness (now "
            f"{config.buffer.max_staleness}) or rollout.max_concurrent."
        )
    elif summary.wait_share > _NOTABLE:
        advice.append(
            f"The trainer waits {summary.wait_share:.0%} of its time for batches. Use more servers "
            "and fewer trainer GPUs."
        )
    elif summary.idle_share > _NOTABLE:
        advice.append(
            f"The servers are idle {summary.idle_share:.0%} of their time. Use more trainer GPUs "
            "and fewer servers."
        )
    else:
        advice.append("Trainer and servers keep pace with each other.")
    if summary.pause_share > _NOTABLE / 2:
        advice.append(
            f"Pushes pause the servers {summary.pause_share:.0%} of their time: push less often "
            "with sync.every, and raise buffer.max_staleness by as many steps."
        )
    if summary.masked_share > 0.01:
        advice.append(
            f"{summary.masked_share:.0%} of the tokens are too stale to train on: raise "
            "buffer.max_staleness, or set buffer.window."
        )
    if summary.preempted:
        advice.append(
            f"{summary.preempted} requests lost their KV cache because it was full: lower "
            "rollout.max_concurrent, or raise server.tensor_parallel."
        )
    return advice


def _advise_on_turns(config: SimulateConfig, summary: Summary) -> list[str]:
    """Say whether the same GPUs are faster if some only generate, and the others only train."""
    apart = deepcopy(config)
    apart.server.args = {**config.server.args, "enable_memory_saver": False}
    apart.rollout.interrupt = "in_place"
    splits = {name: simulated(split) for name, split in _splits(apart, num_gpus(config))}
    if not splits:
        return ["Servers and trainer cannot have GPUs of their own: there are too few."]
    best = max(splits, key=lambda name: splits[name].tokens_per_s)
    ratio = splits[best].tokens_per_s / summary.tokens_per_s
    result = f"With GPUs of their own, {best} generating, they train on {ratio:.2f} times as many"
    if ratio < 1:
        return [f"{result} tokens a second: using them in turn is faster."]
    return [f"{result} tokens a second: use them in turn only if the model does not fit otherwise."]
