"""The result of one check: its severity, and the numbers that show it."""

from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """ALARM: the run is broken or learns nothing. HINT: it could be faster or better."""

    ALARM = "alarm"
    HINT = "hint"


class Sign(NamedTuple):
    """The severity of a finding and its evidence, numbers included."""

    severity: Severity
    evidence: str


def alarm(evidence: str) -> Sign:
    """Return the sign of an alarm."""
    return Sign(Severity.ALARM, evidence)


def hint(evidence: str) -> Sign:
    """Return the sign of a hint."""
    return Sign(Severity.HINT, evidence)
