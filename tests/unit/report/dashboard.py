"""The dashboard that ships, as tests see it."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "examples/monitoring"
DASHBOARD = json.loads((MONITORING / "grafana/dashboard.json").read_text())


def expressions() -> list[str]:
    """What its panels and its variable ask Prometheus, SGLang's metrics by the names that SGLang gives them.

    Its library writes an underscore for the colon when a Prometheus before version 3 asks: the dashboard takes either.
    """
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    asked += [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"]]
    return [
        re.sub(r'\{__name__=~"sglang\[:_\](\w+)", ', r"sglang:\1{", expression)
        for expression in asked
    ]


def metrics(prefix: str) -> set[str]:
    """The names that it asks for and that begin with `prefix`, without it."""
    names = re.findall(r"[\w:]+", " ".join(expressions()))
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def of_steps() -> set[str]:
    """Keys of metrics.jsonl."""
    return {name for name in metrics("areal_lite_") if not name.startswith(("run_", "eval_"))}
