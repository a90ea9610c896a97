"""Predict runs on machines that are not here: see docs/simulate.md."""

from benchmarks.simulate.command import run

__all__ = ["run"]
