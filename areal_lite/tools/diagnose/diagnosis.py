"""From the records of a run to its findings: alarms first, at most one for each cause.

A finding that another one explains is left out. docs/diagnose_page.py writes the page of findings,
metrics and thresholds.
"""

import sys
from dataclasses import replace
from pathlib import Path

from areal_lite.config.help import show
from areal_lite.tools.commands import DiagnoseConfig, existing_run, no_traceback
from areal_lite.tools.diagnose import failures, learning, signals, speed
from areal_lite.tools.diagnose.history import Finding, History, Severity, Sign, limit, read_history

_NAMES = vars(signals) | vars(failures) | vars(learning) | vars(speed)
GUIDE = [kind for kind in _NAMES.values() if isinstance(kind, Finding)]
"""Every kind of finding, in the order in which findings of one severity are shown."""


def diagnose(run: History) -> list[Finding]:
    """Return the findings about a run, alarms before hints."""
    found = [finding for kind in GUIDE if (finding := _check(kind, run))]
    names = {finding.name for finding in found}
    unexplained = [finding for finding in found if names.isdisjoint(finding.unless)]
    return sorted(unexplained, key=lambda finding: finding.severity is not Severity.ALARM)


def _check(kind: Finding, run: History) -> Finding | None:
    try:
        sign = kind.check(run)
    except Exception as error:  # the other findings and the summary at the end of a run remain
        return Finding(
            failed_check,
            title=f"The check {kind.name} failed",
            flag="",
            cause="a fault of the check, or damaged records",
            change="report it with the files of the run",
            unless=(),
            evidence=f"{type(error).__name__}: {error}",
        )
    return sign and replace(kind, severity=sign.severity, evidence=sign.evidence, **sign.words)


def failed_check(_: History) -> Sign | None:
    """Give its name to the finding about a check that raised."""


def diagnosis_text(run: History) -> str:
    """Return the findings as text for a terminal."""
    findings = diagnose(run)
    state = "going on" if run.running else "ended"
    steps = f"{run.run_dir}: {state}, step {run.step} of {run.config.trainer.steps}"
    if not findings:
        few = len(run.metrics) < limit("recent_steps")
        note = " (few steps: most checks need more)" if few else ""
        return f"{steps}\n\nNo findings: no check found anything wrong{note}."
    parts = [
        f"{finding.severity.upper():<6} {finding.title}\n"
        f"  evidence  {finding.evidence.replace(chr(10), chr(10) + ' ' * 10)}\n"
        f"  cause     {finding.cause}\n"
        f"  change    {finding.change.replace('`', '')}"
        for finding in findings
    ]
    return "\n\n".join([steps, *parts])


def missing_signal(run_dir: Path) -> str | None:
    """Say that a run has nothing to learn from, with some of its answers; None if it has."""
    found = [f for f in diagnose(read_history(run_dir)) if f.name == signals.no_signal.name]
    return f"{found[0].title}: {found[0].evidence}" if found else None


def alarm_line(run_dir: Path) -> str | None:
    """Return a line that leads to the findings of a run; None without an alarm."""
    findings = diagnose(read_history(run_dir))
    if not any(finding.severity is Severity.ALARM for finding in findings):
        return None
    count = f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"
    return f"areal-lite diagnose {run_dir} explains {count}"


@no_traceback()
def run(config: DiagnoseConfig) -> int:
    """Print the findings about a run."""
    # What follows of a line is below the words of its first part.
    show(diagnosis_text(read_history(existing_run(config.run_dir))), 12, sys.stdout)
    return 0
