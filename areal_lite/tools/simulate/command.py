"""Run `areal-lite simulate`: a table, advice in words, and the numbers as a file on request."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from areal_lite.system.files import write_atomically
from areal_lite.tools.commands import SimulateConfig
from areal_lite.tools.simulate.comparisons import (
    QUESTIONS,
    Variant,
    check_simulation,
    compare,
    num_gpus,
    simulated,
)
from areal_lite.tools.simulate.run import Summary

# Shares of time from which something is worth a word.
_NOTABLE = 0.1
# A variant within this share of the best one is as good.
_AS_GOOD = 0.03
# Efficiency against the smallest number of GPUs below which more of them hardly help.
_SCALES = 0.7


def run(config: SimulateConfig) -> int:
    """Simulate the settings and print what came out. Raises ValueError for a bad setting."""
    check_simulation(config)
    with _without_log():
        summary = simulated(config)
        print(summary_text(config, summary), "", *advise(config, summary), sep="\n", flush=True)
        comparisons: dict[str, list[Variant]] = {}
        for question in config.simulate.compare:
            comparisons[question] = variants = list(compare(question, config))
            text = comparison_text(question, variants)
            print("", text, "", conclude(question, variants), sep="\n")
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
    """Write the numbers as JSON."""
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
    little = summary.little_tokens_per_s
    rows = [
        ("GPUs", f"{num_gpus(config)}: {generating} generate, {config.trainer.world_size} train"),
        ("trained tokens a second", f"{summary.tokens_per_s:,.0f}"),
        ("by Little's law alone", f"{little:,.0f} ({little / summary.tokens_per_s - 1:+.0%})"),
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
    first = variants[0].summary.tokens_per_s
    heads = ("tokens/s", "index", "trainer waits", "servers idle", "staleness", "Little's law")
    cells = [
        (
            f"{v.summary.tokens_per_s:,.0f}",
            f"{v.summary.tokens_per_s / first:.2f}",
            f"{v.summary.wait_share:.0%}",
            f"{v.summary.idle_share:.0%}",
            f"{v.summary.staleness_mean:.2f}",
            f"{v.summary.little_tokens_per_s:,.0f}",
        )
        for v in variants
    ]
    names = [QUESTIONS[question], *(v.name for v in variants)]
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
            "rollout.max_concurrent, set rollout.adapt_concurrency=true, or raise "
            "server.tensor_parallel."
        )
    return advice


def conclude(question: str, variants: Sequence[Variant]) -> str:
    """Say in a sentence or two what a comparison shows."""
    best = max(variants, key=_speed)
    if question == "servers":
        config = best.config
        generating = config.server.count * config.server.tensor_parallel
        ratio = generating / config.trainer.world_size
        return (
            f"Fastest: {generating} GPUs generate and {config.trainer.world_size} train, "
            f"{ratio:.1f} generating GPUs for each that trains (server.count={config.server.count} "
            f"trainer.data_parallel={config.trainer.data_parallel})."
        )
    if question == "staleness":
        enough = next(v for v in variants if _speed(v) >= (1 - _AS_GOOD) * _speed(best))
        first = variants[0]
        return (
            f"buffer.max_staleness={enough.name} is within {_AS_GOOD:.0%} of the fastest, and "
            f"{_speed(enough) / _speed(first):.2f} times as fast as {first.name}."
        )
    if question == "scale":
        return _scaling(variants)
    base = variants[0]
    others = [f"{variant.name}: {_speed(variant) / _speed(base):.2f}" for variant in variants[1:]]
    return f"Speed against {base.name!r}: {', '.join(others)}."


def _scaling(variants: Sequence[Variant]) -> str:
    """Say up to how many GPUs the speed follows their number."""
    base = variants[0]
    efficiency = {v.gpus: _speed(v) / _speed(base) * base.gpus / v.gpus for v in variants}
    good = [gpus for gpus, share in efficiency.items() if share >= _SCALES]
    shares = ", ".join(f"{gpus} GPUs {share:.0%}" for gpus, share in efficiency.items())
    if len(good) == len(efficiency):
        return f"It scales to {max(good)} GPUs. Speed per GPU: {shares}."
    return f"Beyond {max(good)} GPUs more of them hardly help. Speed per GPU: {shares}."


def _speed(variant: Variant) -> float:
    return variant.summary.tokens_per_s
