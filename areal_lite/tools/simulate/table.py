"""The results of a simulation as text for a terminal."""

from collections.abc import Sequence

from areal_lite.tools.commands import SimulateConfig
from areal_lite.tools.simulate.comparisons import QUESTIONS, Variant, num_gpus
from areal_lite.tools.simulate.summary import Summary


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
