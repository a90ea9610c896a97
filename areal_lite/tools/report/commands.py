"""The commands that show runs: report, compare, inspect, trace. Each returns an exit status."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from areal_lite.config.report import (
    AuditConfig,
    CompareConfig,
    DiagnoseConfig,
    InspectConfig,
    ReportConfig,
    TraceConfig,
)
from areal_lite.run_dir.paths import TRACE_FILE, check_run_dir
from areal_lite.system.files import write_atomically
from areal_lite.tools.report import demo


def report(config: ReportConfig) -> int:
    """Write report.html and report.png of a run, or serve the page during the run."""
    run_dir = chosen_run(config)
    if config.follow:
        return _follow(run_dir, config.port)
    from areal_lite.tools.report.figure import write_report  # matplotlib is slow to import
    from areal_lite.tools.report.page_build import write_page

    print(write_page(run_dir))
    print(write_report(run_dir))
    return 0


def compare(config: CompareConfig) -> int:
    """Write one page about several runs."""
    from areal_lite.tools.report.compare import compare_page

    runs = [Path(run) for run in config.runs]
    if config.demo:
        runs = [demo.unpack("demo"), demo.unpack("demo-sync")]
    for run_dir in runs:
        check_run_dir(run_dir)
    write_atomically(Path(config.out), compare_page(runs))
    print(config.out)
    return 0


def inspect(config: InspectConfig) -> int:
    """Print trajectories."""
    from areal_lite.tools.report.inspection import show_matching

    console = Console(highlight=False, soft_wrap=True)
    for part in show_matching(chosen_run(config), config):
        console.print(part)
    return 0


def trace(config: TraceConfig) -> int:
    """Write the trace of a run."""
    from areal_lite.tools.report.trace import write_trace

    run_dir = chosen_run(config)
    path = Path(config.out) if config.out else run_dir / TRACE_FILE
    events = write_trace(run_dir, path)
    print(f"{path}: {events:,} events; open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def chosen_run(
    config: ReportConfig | InspectConfig | TraceConfig | DiagnoseConfig | AuditConfig,
) -> Path:
    """Return the run directory, that of the demo included. Raises ValueError for neither."""
    if config.demo:
        return demo.unpack()
    if config.run_dir is None:
        raise ValueError("run_dir is not set: name a run directory, or add --demo for a small run")
    check_run_dir(Path(config.run_dir))
    return Path(config.run_dir)


def _follow(run_dir: Path, port: int) -> int:
    from areal_lite.tools.report.follow import page_server

    try:
        server = page_server(run_dir, port)
    except OSError as error:
        raise ValueError(f"port={port}: cannot listen there ({error.strerror})") from error
    host, chosen = server.server_address[:2]
    print(f"http://{host}:{chosen}/ shows {run_dir} until you press Ctrl-C", file=sys.stderr)
    server.serve_forever()
    return 0
