"""Advice in words, from the numbers of a simulated run and of its comparisons."""

from collections.abc import Sequence

from areal_lite.tools.commands import SimulateConfig
from areal_lite.tools.simulate.comparisons import Variant
from areal_lite.tools.simulate.summary import Summary

# Shares of time from which something is worth a word.
_NOTABLE = 0.1

# A variant within this share of the best one is as good.
_AS_GOOD = 0.03

# Efficiency against the smallest number of GPUs below which more of them hardly help.
_SCALES = 0.7


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
