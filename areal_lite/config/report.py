"""Settings of the commands that show runs: report, compare, inspect, trace, diagnose,
audit.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_lite.config.fields import MAX_COUNT, setting

_RUN = "Run directory of a run that has ended or is still running."
_DEMO = "Show a small run that is part of the package. It is unpacked to runs/demo."


@dataclass
class ReportConfig:
    """One page about a run, to open in a browser."""

    run_dir: str | None = setting(None, _RUN)
    demo: bool = setting(False, _DEMO)
    follow: bool = setting(
        False, "Serve the page on this machine's loopback address and update it during the run."
    )
    port: int = setting(0, "follow: port of the page. 0: any free port.", minimum=0, maximum=65535)


@dataclass
class CompareConfig:
    """One page about two or more runs."""

    runs: list[str] = setting([], "Run directories: runs=[runs/a,runs/b]. The first is the base.")
    demo: bool = setting(
        False, "Compare two small runs that are part of the package (runs/demo, runs/demo-sync)."
    )
    out: str = setting("compare.html", "File of the page.")


@dataclass
class InspectConfig:
    """Trajectories in the terminal, those that every given filter lets through."""

    run_dir: str | None = setting(None, _RUN)
    demo: bool = setting(False, _DEMO)
    group: int | None = setting(
        None, "Number of the rollout group, from 0.", minimum=0, maximum=MAX_COUNT
    )
    step: int | None = setting(
        None, "Training step that used the trajectory, from 1.", minimum=1, maximum=MAX_COUNT
    )
    version: int | None = setting(
        None, "Weight version of at least one token.", minimum=0, maximum=MAX_COUNT
    )
    reward_min: float | None = setting(None, "Least reward.", minimum=-1e6, maximum=1e6)
    reward_max: float | None = setting(None, "Largest reward.", minimum=-1e6, maximum=1e6)
    limit: int = setting(
        3, "Largest number of trajectories to print.", minimum=1, maximum=MAX_COUNT
    )


@dataclass
class TraceConfig:
    """Servers, requests, pushes and steps as a trace for Perfetto or chrome://tracing."""

    run_dir: str | None = setting(None, _RUN)
    demo: bool = setting(False, _DEMO)
    out: str | None = setting(None, "File of the trace. null: trace.json in the run directory.")


@dataclass
class DiagnoseConfig:
    """Find problems of a run: alarms, hints, and the settings to change."""

    run_dir: str | None = setting(None, _RUN)
    demo: bool = setting(False, _DEMO)


@dataclass
class AuditConfig:
    """Prove from the files of a run that nothing was lost and nothing was used twice."""

    run_dir: str | None = setting(None, _RUN)
    demo: bool = setting(False, _DEMO)
    tokens: bool = setting(
        False, "Also read every token of the store: checksums, log-probs and versions."
    )


VIEWS: dict[str, type] = {
    "report": ReportConfig,
    "compare": CompareConfig,
    "inspect": InspectConfig,
    "trace": TraceConfig,
    "diagnose": DiagnoseConfig,
    "audit": AuditConfig,
}
