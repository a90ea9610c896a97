"""Write a run as a trace for https://ui.perfetto.dev or chrome://tracing.

    python examples/monitoring/trace.py runs/NAME [trace.json]

The trainer is a process with its waits, steps and pushes. Each server is a process, and each of its
threads holds one request at a time. A request is a slice, and its segments are slices within it.
Pushes are global instants. Times are microseconds since the first trajectory.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.system.files import to_plain
from areal_lite.tools.report.run_data import Columns, Metrics, read_run
from areal_lite.tools.report.timeline import Pauses, pack, pushes_of, segment_spans, trainer_spans

_TRAINER = 1  # its process


def write_trace(run_dir: Path, path: Path) -> int:
    """Write a run in the Chrome JSON format, for ui.perfetto.dev or chrome://tracing.

    Returns the number of events, which are written one by one. Raises ValueError for a directory
    without a run.
    """
    run = read_run(run_dir)
    count = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in trace_events(run.columns, run.metrics):
            file.write(",\n" if count else "")
            file.write(json.dumps(to_plain(event), separators=(",", ":")))
            count += 1
        file.write("\n]}\n")
    return count


def trace_events(columns: Columns, metrics: Metrics) -> Iterator[dict[str, Any]]:
    """Yield the events of a run; times are microseconds since the first trajectory.

    Process 1 is the trainer, with its waits, steps and pushes. Each server is a process with a
    thread per request that it had at once; a request is a slice, its segments are slices within it.
    """
    spans = trainer_spans(metrics)
    starts = [float(start.min()) for start, _ in spans.values() if len(start)]
    origin = float(columns.started.min()) if len(columns) else min(starts, default=0.0)
    yield _process(_TRAINER, "trainer")
    for state, (begins, ends) in spans.items():
        for line, begin, end in zip(metrics, begins.tolist(), ends.tolist()):
            if end > begin:
                args = {"step": line["step"], "reward_mean": line.get("reward_mean")}
                yield _slice(state, _TRAINER, 0, begin - origin, end - origin, args)
    paused = pushes_of(metrics)
    for version, (at, seconds) in paused.items():
        yield {
            "ph": "i", "s": "g", "name": f"push of version {version}", "pid": _TRAINER, "tid": 0,
            "ts": round((at - origin) * 1e6), "args": {"pause_s": seconds},
        }  # fmt: skip
    for index, name in enumerate(columns.servers):
        yield _process(_TRAINER + 1 + index, name)
        yield from _requests(columns, index, paused, origin)


def _requests(
    columns: Columns, index: int, paused: Pauses, origin: float
) -> Iterator[dict[str, Any]]:
    pid = _TRAINER + 1 + index
    own = np.flatnonzero(columns.server == index)
    own = own[np.argsort(columns.started[own], kind="stable")]
    starts, ends = columns.started[own].tolist(), columns.finished[own].tolist()
    rows = pack([0] * len(own), starts, ends)
    for request, row, start, end in zip(own.tolist(), rows, starts, ends):
        args = {
            "reward": float(columns.reward[request]),
            "prompt_tokens": int(columns.prompt[request]),
            "sampled_tokens": int(columns.sampled[request]),
            "step": int(columns.step[request]) + 1 or None,
        }
        title = f"group {columns.group[request]}, sample {columns.name(request)}"
        yield _slice(title, pid, row, start - origin, end - origin, args)
        for version, begin, stop in segment_spans(start, end, columns.segments(request), paused):
            yield _slice(f"version {version}", pid, row, begin - origin, stop - origin, {})


def _slice(
    name: str, pid: int, tid: int, start: float, end: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": pid, "tid": tid, "args": args,
        "ts": round(start * 1e6), "dur": max(1, round(end * 1e6) - round(start * 1e6)),
    }  # fmt: skip


def _process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


if __name__ == "__main__":
    run_dir, *out = map(Path, sys.argv[1:])
    path = out[0] if out else run_dir / "trace.json"
    print(f"{path}: {write_trace(run_dir, path):,} events")
