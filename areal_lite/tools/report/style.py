"""Colors, fonts and the frame that all plots of the report share."""

from typing import Any

from matplotlib.axes import Axes

BLUE = "#2b6cb0"
ORANGE = "#dd8a1f"
RED = "#c53030"
GREEN = "#2f855a"
GREY = "#718096"

STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


def add_grid_and_legend(axes: Axes) -> None:
    """Add horizontal grid lines and, in extra space above the data, the legend."""
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + 0.15 * (top - bottom))
    axes.grid(axis="y", color="#e2e8f0")
    axes.set_axisbelow(True)
    axes.legend(
        loc="upper right",
        ncols=3,
        bbox_to_anchor=(1.0, 1.01),
        borderaxespad=0,
        columnspacing=1.2,
        handlelength=1.5,
    )


def show_empty(axes: Axes) -> None:
    """Write "nothing yet" in place of a plot without data."""
    center = {"ha": "center", "va": "center", "transform": axes.transAxes}
    axes.text(0.5, 0.5, "nothing yet", color=GREY, fontsize=14, **center)
    axes.set(xticks=[], yticks=[])
