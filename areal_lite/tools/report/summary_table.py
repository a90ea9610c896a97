"""The summary of a run as a table for the console."""

from collections.abc import Callable
from typing import Any

from rich.table import Table

from areal_lite.tools.report.text import duration, pause, short


def summary_table(summary: dict[str, Any]) -> Table:
    """Lay out the result of `build_summary`. Unknown values are shown as a dash."""
    table = Table(title="Summary of the run", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, text in _rows(summary):
        table.add_row(name, text)
    return table


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    def show(key: str, form: Callable[[Any], str] = str) -> str:
        return "–" if summary.get(key) is None else form(summary[key])

    percent = "{:.1%}".format
    greedy = f"{show('greedy_before', percent)} → {show('greedy_after', percent)}"
    sampled = f"{show('sampled_before', percent)} → {show('sampled_after', percent)}"
    tokens = f"{show('tokens_per_s', short)} tokens/s"
    trajectories = f"{show('trajectories_per_s', short)} trajectories/s"
    staleness = f"mean {show('staleness_mean', short)}, largest {show('max_staleness', short)}"
    off_policy = {
        "clip_fraction_mean": "{:.2%} of tokens clipped".format,
        "behavior_weight_max": lambda weight: f"behavior weights up to {short(weight)}",
    }
    known = [show(key, form) for key, form in off_policy.items() if summary.get(key) is not None]
    pauses = f"mean {show('pause_s_mean', pause)}, longest {show('pause_s_max', pause)}"
    return [
        ("held-out accuracy, greedy", greedy),
        ("held-out accuracy, sampled", sampled),
        ("held-out problems", show("eval_problems")),
        ("training steps", f"{show('steps')} of {show('steps_planned')}"),
        ("trained on", f"{tokens}, {trajectories}"),
        ("staleness", f"{staleness}, bound {show('staleness_bound')}"),
        ("trajectories of more than one version", show("multi_segment_share", percent)),
        (summary["off_policy_label"], ", ".join(known) or "–"),
        ("weight pushes", show("pushes")),
        ("pause per push", pauses),
        ("requests drained for a push", show("requests_drained")),
        ("trajectories lost", show("trajectories_lost")),
        ("wall time of this start", show("wall_s", duration)),
    ]
