"""The view of a run for a person: live while it goes on, and a report at its end.

An installed package can bring a better observer: the entry `console` of `areal_lite.observers`, an
object with the methods of `Observer`. Without one, a run prints a line a step and writes no report.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from areal_lite.config import TrainConfig
from areal_lite.extensions import OBSERVERS, load
from areal_lite.run_dir.metrics import EventFollower, read_metrics

Poll = Callable[[], None]
"""Shows the present state of the work. It is called several times a second."""


class Observer(Protocol):
    """Shows a run while it goes on, and its results."""

    def watch(self, config: TrainConfig, run_dir: Path) -> AbstractContextManager[Poll]:
        """Show training until the context ends."""
        ...

    def count(
        self, title: str, unit: str, total: int, done: Callable[[], int]
    ) -> AbstractContextManager[Poll]:
        """Show how much of other work is done until the context ends."""
        ...

    def summarize(
        self, config: TrainConfig, run_dir: Path, started_at: float, finished_at: float
    ) -> dict[str, Any]:
        """Return the content of summary.json. Times are wall-clock seconds."""
        ...

    def report(self, run_dir: Path, summary: dict[str, Any]) -> None:
        """Write the report of a run, and print its summary to stderr."""
        ...


class PlainObserver:
    """Prints a line for each training step."""

    @contextmanager
    def watch(self, config: TrainConfig, run_dir: Path) -> Iterator[Poll]:
        steps = EventFollower(run_dir, "metrics")
        steps.read()  # those of an earlier start

        def poll() -> None:
            for step in steps.read():
                reward = step["reward_mean"]
                text = "" if reward is None else f" · reward {reward:.3g}"
                print(f"step {step['step']}/{config.trainer.steps}{text}", file=sys.stderr)

        yield poll
        poll()

    @contextmanager
    def count(self, title: str, unit: str, total: int, done: Callable[[], int]) -> Iterator[Poll]:
        yield lambda: None
        print(f"{title}: {unit} {done()}/{total}", file=sys.stderr)

    def summarize(
        self, config: TrainConfig, run_dir: Path, started_at: float, finished_at: float
    ) -> dict[str, Any]:
        metrics = read_metrics(run_dir)
        return {
            "run_dir": str(run_dir),
            "steps": len(metrics),
            "steps_planned": config.trainer.steps,
            "wall_s": finished_at - started_at,
            "reward_first": metrics[0]["reward_mean"] if metrics else None,
            "reward_last": metrics[-1]["reward_mean"] if metrics else None,
        }

    def report(self, run_dir: Path, summary: dict[str, Any]) -> None:
        print(f"run directory: {run_dir}", file=sys.stderr)


def observer() -> Observer:
    """Return the observer of this machine."""
    return load(OBSERVERS, "console") or PlainObserver()
