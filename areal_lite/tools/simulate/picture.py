"""The picture of the comparisons: speed by variant, simulated and by Little's law."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_lite.tools.simulate.comparisons import QUESTIONS, Variant


def draw(comparisons: Mapping[str, Sequence[Variant]], path: Path) -> None:
    """Draw one panel for each comparison into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, _ = plt.subplots(
        1, len(comparisons), figsize=(4.6 * len(comparisons), 3.6), layout="constrained"
    )
    for axes, (question, variants) in zip(figure.axes, comparisons.items()):
        places = range(len(variants))
        speeds = [v.summary.tokens_per_s / 1e3 for v in variants]
        little = [v.summary.little_tokens_per_s / 1e3 for v in variants]
        axes.bar(places, speeds, 0.6, color="#1f6fb4", label="simulated")
        axes.plot(places, little, "o", color="#d1662b", label="Little's law")
        axes.set(
            xticks=places,
            xticklabels=[v.name for v in variants],
            xlabel=QUESTIONS[question],
            title="thousand trained tokens a second",
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=90)
    plt.close(figure)
