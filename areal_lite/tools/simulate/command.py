"""Run `areal-lite simulate`: a table, advice in words, and a file of results on request."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_lite.system.files import write_atomically
from areal_lite.tools.commands import SimulateConfig
from areal_lite.tools.simulate.advice import advise, conclude
from areal_lite.tools.simulate.comparisons import Variant, compare, simulated
from areal_lite.tools.simulate.picture import draw
from areal_lite.tools.simulate.summary import Summary
from areal_lite.tools.simulate.table import comparison_text, summary_text
from areal_lite.tools.simulate.workload import check_simulation


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
    """Write the numbers as JSON, and a picture of the comparisons beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {
        question: [{"name": v.name, "gpus": v.gpus, **v.summary.as_dict()} for v in variants]
        for question, variants in comparisons.items()
    }
    record = {"run": summary.as_dict(), "comparisons": results}
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    print(f"\nwritten: {path}")
    if comparisons:
        picture = path.with_suffix(".png")
        draw(comparisons, picture)
        print(f"written: {picture}")
