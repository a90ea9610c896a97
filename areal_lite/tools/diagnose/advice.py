"""The texts about a finding, without its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from areal_lite.tools.diagnose.history import History
from areal_lite.tools.diagnose.sign import Sign


class Advice(NamedTuple):
    """A finding without its numbers. Settings stand in backticks."""

    check: Callable[[History], Sign | None]
    title: str
    metrics: tuple[str, ...]
    # When it is found, with the thresholds of limits.py in braces.
    flag: str
    cause: str
    change: str
    unless: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.check.__name__
