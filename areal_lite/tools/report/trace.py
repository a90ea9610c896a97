"""A run as a trace in the Chrome JSON format, for ui.perfetto.dev or chrome://tracing.

Process 1 is the trainer, with its waits, steps and pushes. Each server is a process with a thread
per request that it had at once; a request is a slice, its segments are slices within it. Times are
microseconds since the first trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.system.files import to_plain
from areal_lite.tools.report.columns import Columns
from areal_lite.tools.report.measures import trainer_spans
from areal_lite.tools.report.run_data import read_run
from areal_lite.tools.report.windows import pack, pushes_of, segment_spans
from areal_lite.trajectory import trace_name

_TRAINER = 1


def write_trace(run_dir: Path, path: Path) -> int:
    """Write the trace of a run to `path` and return its number of events.

    Events are written one by one. Raises ValueError for a directory without a run.
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


def trace_events(
    columns: Columns, metrics: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the events of a run: names of the lanes first, then slices and pushes."""
    spans = trainer_spans(metrics)
    starts = [float(start.min()) for start, _ in spans.values() if len(start)]
    origin = float(columns.started.min()) if len(columns) else min(starts, default=0.0)
    yield _name("process_name", _TRAINER, 0, "trainer")
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
        yield from _server(columns, index, name or "servers", paused, origin)


def _server(
    columns: Columns, index: int, name: str, paused: Any, origin: float
) -> Iterator[dict[str, Any]]:
    pid = _TRAINER + 1 + index
    yield _name("process_name", pid, 0, name)
    own = np.flatnonzero(columns.server == index)
    own = own[np.argsort(columns.started[own], kind="stable")]
    starts, ends = columns.started[own].tolist(), columns.finished[own].tolist()
    for request, row, start, end in zip(
        own.tolist(), pack([0] * len(own), starts, ends), starts, ends
    ):
        args = {
            "reward": float(columns.reward[request]),
            "prompt_tokens": int(columns.prompt[request]),
            "sampled_tokens": int(columns.sampled[request]),
            "step": int(columns.step[request]) + 1 or None,
        }
        name = trace_name(int(columns.sample[request]), int(columns.trace[request]))
        title = f"group {columns.group[request]}, sample {name}"
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


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
