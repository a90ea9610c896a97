"""Profiles of training steps: `AREAL_LITE_PROFILE=3,10` names the steps, counted from 1.

Each rank writes RUN/profile/step-N-rank-R.json.gz, a trace for ui.perfetto.dev, and with a GPU
step-N-rank-R.pickle, a history of its memory for pytorch.org/memory_viz.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_lite.run_dir.paths import PROFILE_DIR
from areal_lite.system import heartbeat


def profiled_steps() -> list[int]:
    """Return the steps that the environment names, from 1. Raises ValueError."""
    named = os.environ.get("AREAL_LITE_PROFILE", "")
    steps = named.split(",") if named else []
    if not all(step.isascii() and step.isdecimal() and int(step) for step in steps):
        raise ValueError(f"AREAL_LITE_PROFILE={named}: name training steps from 1, such as 3,10")
    return sorted(map(int, steps))


@contextmanager
def profiled(step: int, rank: int, run_dir: Path) -> Iterator[None]:
    """Profile what this rank does inside the block, if `step` is named. step: from 1."""
    if step not in profiled_steps():
        yield
        return
    import torch  # here, because the supervisor does without it

    path = run_dir / PROFILE_DIR / f"step-{step}-rank-{rank}"
    path.parent.mkdir(exist_ok=True)
    memory = torch.cuda.memory if torch.cuda.is_available() else None
    if memory:
        memory._record_memory_history(max_entries=1_000_000)  # a kilobyte of host memory each
    try:
        with torch.profiler.profile(record_shapes=True, profile_memory=True) as trace:
            yield
        heartbeat.enter(f"writing the profile of step {step}")
        trace.export_chrome_trace(f"{path}.json.gz")
    finally:  # the memory of a step that ran out of it, too
        if memory:
            memory._dump_snapshot(f"{path}.pickle")
            memory._record_memory_history(enabled=None)
