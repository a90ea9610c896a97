"""The logs of a run: JSON lines that survive a kill, and trackers on request.

`metrics.jsonl` has one line per training step, `evals.jsonl` one per evaluation.

A line is complete when it ends with a newline. Readers ignore an incomplete last line, and the next
writer (a resumed run) cuts it off. JSON has no NaN: numbers that are not finite become null.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Protocol, TextIO

from areal_lite.config import LoggerConfig
from areal_lite.extensions import TRACKERS, load, load_object, names
from areal_lite.run_dir.paths import METRICS_FILE
from areal_lite.system.files import open_regular, sync_path, to_plain, write_atomically
from areal_lite.system.processes import start_daemon, steady_time

log = logging.getLogger(__name__)

STEP_KEYS = (
    "step",
    "version",
    "time_s",
    "reward_mean",
    "staleness_mean",
    "staleness_max",
    "segments_mean",
    "tokens",
    "loss",
    "grad_norm",
    "behave_kl",
    "ess",
    "pause_s",
)
"""Keys that every training step reports. The trainer may add more."""

_AXES = {"metrics": "step", "evals": "version"}
_LONGEST_LINE = 1 << 28  # bytes
_END_BYTES = 1 << 13  # that are read at first for the newest lines
_FINISH_TIMEOUT_S = 120.0


class Tracker(Protocol):
    """A place for the metrics besides metrics.jsonl.

    It is made by `name(run_dir, run_config, **arguments)`, on the thread of all its calls.
    """

    def log_step(self, record: Mapping[str, Any], /) -> None: ...

    def log_evaluation(self, record: Mapping[str, Any], /) -> None: ...

    def finish(self) -> None: ...


def tracker_class(name: str) -> Callable[..., Tracker]:
    """Return what makes the tracker `name`. Raises ValueError if it is unknown or not installed."""
    if ":" in name:
        return load_object("logger.trackers", name)
    if (found := load(TRACKERS, name)) is None:
        known = ", ".join(names(TRACKERS)) or "none is installed"
        raise ValueError(f"logger.trackers: {name} is unknown: choose from module:Class, {known}")
    if find_spec(found.package) is None:
        raise ValueError(f"logger.trackers: {name} is not installed: pip install {found.package}")
    return found


class _Tracking:
    """A tracker on its own thread: it delays and ends nothing. After an error it gets no more."""

    def __init__(self, name: str, make: Callable[[], Tracker]):
        self._name = name
        self._calls: SimpleQueue[tuple[str, tuple]] = SimpleQueue()
        self._ended = start_daemon(self._run, make)

    def send(self, call: str, *args: Any) -> None:
        """Make a call of the tracker soon."""
        if not self._ended.done():
            self._calls.put((call, args))

    def finish(self) -> None:
        """Wait until everything is sent, at most two minutes."""
        self.send("finish")
        try:
            self._ended.result(_FINISH_TIMEOUT_S)
        except TimeoutError:
            log.warning(
                "%s did not end within %.0f s: the run ends without it, and its last metrics may "
                "be missing there",
                self._name,
                _FINISH_TIMEOUT_S,
            )

    def _run(self, make: Callable[[], Tracker]) -> None:
        call = "start"
        try:
            tracker = make()
            while call != "finish":
                call, args = self._calls.get()
                getattr(tracker, call)(*args)
        except BaseException as error:  # whatever a tracker raises
            log.warning(
                "%s could not %s, and the run goes on without it: %s: %s",
                self._name,
                call.replace("_", " "),
                type(error).__name__,
                error,
            )


class MetricsLog:
    """The log of trainer rank 0, and its trackers. It adds `logged_at`, in wall-clock seconds."""

    def __init__(self, run_dir: Path, config: LoggerConfig, run_config: Mapping[str, Any]):
        self._run_dir = Path(run_dir)
        self._file = _open_for_append(self._run_dir / METRICS_FILE)
        arguments = self._run_dir, to_plain(run_config)
        self._trackers = [
            _Tracking(name, partial(tracker_class(name), *arguments, **config.args.get(name, {})))
            for name in config.trackers
        ]

    def log(self, record: Mapping[str, Any]) -> None:
        """Append the record of a training step. Raises ValueError if it lacks one of STEP_KEYS."""
        if missing := [key for key in STEP_KEYS if key not in record]:
            raise ValueError(f"the record of a training step lacks {', '.join(missing)}")
        record = to_plain({"logged_at": steady_time(), **record})
        # A checkpoint of this step must not outlive its line.
        _write_line(self._file, record, durable=True)
        for tracker in self._trackers:
            tracker.send("log_step", record)

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Append the record of an evaluation to evals.jsonl."""
        append_event(self._run_dir, "evals", record, durable=True)
        for tracker in self._trackers:
            tracker.send("log_evaluation", to_plain(record))

    def close(self) -> None:
        """Close the file, and end the trackers."""
        self._file.close()
        for tracker in self._trackers:
            tracker.finish()


def read_metrics(run_dir: Path, newest: int | None = None) -> list[dict[str, Any]]:
    """Read the training steps that a run has logged so far, or only the `newest` of them."""
    return read_events(run_dir, "metrics", newest)


def append_event(
    run_dir: Path, name: str, record: Mapping[str, Any], durable: bool = False
) -> None:
    """Append one line to `<run_dir>/<name>.jsonl`. A file must have one writer.

    A crash of the machine may lose a line that is not `durable`.
    """
    with _open_for_append(_log_file(run_dir, name)) as file:
        _write_line(file, to_plain(record), durable)


def forget_after(run_dir: Path, version: int) -> None:
    """Cut off the training steps and the evaluations after `version`, where the run resumes."""
    for name, key in _AXES.items():
        if (path := _log_file(run_dir, name)).exists():
            kept = [record for record in read_events(run_dir, name) if record[key] <= version]
            lines = [json.dumps(record, allow_nan=False) + "\n" for record in kept]
            write_atomically(path, "".join(lines))


def read_events(run_dir: Path, name: str, newest: int | None = None) -> list[dict[str, Any]]:
    """Read the complete lines of `<run_dir>/<name>.jsonl`, or only the `newest` of them.

    Returns [] without that file. Raises ValueError for a line that is not a record of it.
    """
    if not (path := _log_file(run_dir, name)).exists():
        return []
    with open_regular(path) as file:
        complete = _complete_lines(file) if newest is None else _newest_lines(file, newest)
    try:
        records = [json.loads(line) for line in complete]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a line that is not JSON ({error}): remove it") from error
    axis = _AXES.get(name)
    if not all(isinstance(r, dict) and (not axis or isinstance(r.get(axis), int)) for r in records):
        raise ValueError(f"{path} has a line without an integer {axis}: remove it")
    return records


def _complete_lines(file: BinaryIO) -> list[bytes]:
    lines = iter(lambda: file.readline(_LONGEST_LINE), b"")
    # After the last newline comes nothing, or an incomplete line.
    return list(takewhile(lambda line: line.endswith(b"\n"), lines))


def _newest_lines(file: BinaryIO, number: int) -> list[bytes]:
    """Return the last complete lines. The file may be long, so only its end is read."""
    start = end = file.seek(0, os.SEEK_END)
    lines: list[bytes] = []
    # The first line may lack its beginning, and the last one is empty or incomplete.
    while start > 0 and len(lines) < number + 2:
        if end - start > _LONGEST_LINE:
            raise ValueError(f"{file.name} has a line that is too long: remove it")
        start = max(0, 2 * start - end - _END_BYTES)
        file.seek(start)
        lines = file.read(end - start).split(b"\n")
    return lines[:-1][-number:]


class EventFollower:
    """Reads the lines that a run appends to `<run_dir>/<name>.jsonl`, each once."""

    def __init__(self, run_dir: Path, name: str):
        self._path = _log_file(run_dir, name)
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the JSON objects in the complete lines that are new since the last call."""
        complete, found = b"", []
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(self._offset)
            complete = file.read().rpartition(b"\n")[0]
        self._offset += len(complete) + 1 if complete else 0
        for line in complete.split(b"\n"):
            with suppress(ValueError, RecursionError):
                if isinstance(event := json.loads(line), dict):
                    found.append(event)
        return found


def _log_file(run_dir: Path, name: str) -> Path:
    return Path(run_dir) / f"{name}.jsonl"


def _open_for_append(path: Path) -> TextIO:
    """Open a log to append lines; cut off a line that an earlier writer left incomplete."""
    if not path.exists():
        path.touch()
        sync_path(path.parent)
    with open(path, "rb+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read() != b"\n":  # otherwise the file, which may be long, is not read
            file.truncate(path.read_bytes().rfind(b"\n") + 1)
    return open(path, "a", encoding="utf-8")


def _write_line(file: TextIO, record: Mapping[str, Any], durable: bool) -> None:
    file.write(json.dumps(record, allow_nan=False) + "\n")
    file.flush()
    if durable:
        os.fsync(file.fileno())
