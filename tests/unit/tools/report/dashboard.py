"""The Grafana dashboard in examples/monitoring, for tests."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
MONITORING = ROOT / "examples/monitoring"
DASHBOARD = json.loads((MONITORING / "grafana/dashboard.json").read_text())


def expressions() -> list[str]:
    """Return the Prometheus queries of the panels and of the variable.

    SGLang's metrics have a colon in their names. Its library replaces it by an underscore for
    Prometheus before version 3. The dashboard accepts both; here both become the colon.
    """
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    asked += [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"]]
    return [
        re.sub(r'\{__name__=~"sglang\[:_\](\w+)", ', r"sglang:\1{", expression)
        for expression in asked
    ]


def metrics(prefix: str) -> set[str]:
    """Return the queried metrics whose names begin with `prefix`, without the prefix."""
    names = re.findall(r"[\w:]+", " ".join(expressions()))
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def of_steps() -> set[str]:
    """Return the queried keys of metrics.jsonl."""
    return {name for name in metrics("areal_lite_") if not name.startswith(("run_", "eval_"))}
