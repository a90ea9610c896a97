"""What a run writes down while it goes: JSON lines that survive a kill, small JSON files that are never half there, and wandb if asked.

`<run_dir>/metrics.jsonl` has one object per training step, `<run_dir>/evals.jsonl` one per evaluation. A line is complete when it ends with
a newline: readers ignore a torn last line, and the next writer (a resumed run) cuts it off. JSON knows no NaN: non-finite numbers are null.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from areal_lite.config import LoggerConfig
from areal_lite.system.files import to_plain, write_atomically

# What every training step reports; the trainer may add to it. Report and summary rely on these.
STEP_KEYS = {
    "step": "number of the step, from 1",
    "version": "weight version after the step: the number of completed steps",
    "time_s": "seconds from the end of the previous step to the end of this one, waiting included",
    "reward_mean": "mean reward of the step's trajectories",
    "staleness_mean": "mean staleness of the sampled tokens of the batch, in versions",
    "staleness_max": "largest staleness of a sampled token",
    "segments_mean": "mean number of segments of the step's trajectories",
    "tokens": "sampled tokens of the batch",
    "loss": "mean loss of the minibatches",
    "grad_norm": "mean gradient norm before clipping",
    "behave_kl": "estimated KL(behavior || proximal) per trained token, in nats",
    "ess": "effective sample size of the behavior weights, as a share of 1",
    "pause_s": "pause window of the push of `version` in seconds; null when nothing was pushed",
}
_TAIL_BYTES = 8192  # a few lines


class MetricsLog:
    """The training log of trainer rank 0.

    Each record also gets `logged_at`, wall-clock seconds at its writing; `paused_at` (wall-clock seconds, of the push of `version`) comes
    from the trainer. wandb is imported only when it is asked for; `offline` needs no account and writes under `run_dir`.
    """

    def __init__(self, run_dir: Path, config: LoggerConfig, run_config: Mapping[str, Any]):
        self._file = _open_for_append(Path(run_dir) / "metrics.jsonl")
        self._wandb = None
        if config.wandb != "off":
            import wandb

            self._wandb = wandb.init(
                project=config.project,
                name=Path(run_dir).name,
                dir=str(run_dir),
                config=to_plain(run_config),
                mode=config.wandb,  # pyright: ignore[reportArgumentType]
            )

    def log(self, record: Mapping[str, Any]) -> None:
        """Append the record of one training step. Raises ValueError when one of STEP_KEYS is missing."""
        missing = [key for key in STEP_KEYS if key not in record]
        if missing:
            raise ValueError(f"a training step must report {', '.join(missing)}")
        record = to_plain({"logged_at": time.time(), **record})
        _write_line(self._file, record)
        if self._wandb is not None:
            self._wandb.log(
                {key: value for key, value in record.items() if value is not None},
                step=record["step"],
            )

    def close(self) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The training steps that a run has logged so far; [] before the first."""
    return read_events(run_dir, "metrics")


def append_event(run_dir: Path, name: str, record: Mapping[str, Any]) -> None:
    """Append one line to `<run_dir>/<name>.jsonl`, for what happens now and then, such as an evaluation. One writer per file."""
    with _open_for_append(Path(run_dir) / f"{name}.jsonl") as file:
        _write_line(file, to_plain(record))


def forget_after(run_dir: Path, version: int) -> None:
    """Cut off the training steps after `version` and the evaluations of later weights: a run goes on from there and will write them again."""
    for name, key in (("metrics", "step"), ("evals", "version")):
        path = Path(run_dir) / f"{name}.jsonl"
        if path.exists():
            kept = [record for record in read_events(run_dir, name) if record[key] <= version]
            write_atomically(
                path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept)
            )


def read_events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The complete lines of `<run_dir>/<name>.jsonl`; [] when there is no such file. Raises ValueError for a line that is not JSON."""
    path = Path(run_dir) / f"{name}.jsonl"
    if not path.exists():
        return []
    complete = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is empty or torn
    try:
        return [json.loads(line) for line in complete]
    except ValueError as error:
        raise ValueError(f"{path} has a line that is not JSON ({error}): remove it") from error


def newest_event(run_dir: Path, name: str) -> dict[str, Any] | None:
    """The last complete line of `<run_dir>/<name>.jsonl`, None without one; however long the file is, only its end is read."""
    try:
        file = open(Path(run_dir) / f"{name}.jsonl", "rb")
    except FileNotFoundError:
        return None
    with file:
        start = end = file.seek(0, os.SEEK_END)
        lines: list[
            bytes
        ] = []  # the first may lack its beginning; what follows the last newline is empty or torn
        while len(lines) < 3 and start > 0:
            start = max(0, 2 * start - end - _TAIL_BYTES)
            file.seek(start)
            lines = file.read(end - start).split(b"\n")
    return json.loads(lines[-2]) if len(lines) > 1 else None


def _open_for_append(path: Path) -> TextIO:
    """Open to append whole lines: a line that an earlier writer left torn is cut off first."""
    if path.exists():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
    return open(path, "a", encoding="utf-8")


def _write_line(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(json.dumps(record, allow_nan=False) + "\n")
    file.flush()
