"""Trackers of `logger.trackers`: the metrics of a run in groups, each on the axis it belongs to.

The axis of a training step's metrics is `step`. An evaluation may end after later steps, so its
axis is the version that it evaluated. All starts of a run directory are one run of a tracker.

Metrics go through a thread of each tracker, and an error ends the tracker alone
(run_dir/metrics.py).
"""

import importlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from areal_lite.system.files import write_atomically
from areal_lite.tools.metric_table import GROUP_OF, GROUPS

OTHER = "other"
_PROJECT = "areal_lite"
_INIT_TIMEOUT_S = 60.0


def grouped_name(key: str) -> str | None:
    """Return the name of a metric in a tracker; None if it is not sent there."""
    group = GROUP_OF.get(key.partition("/")[0], OTHER)
    return f"{group}/{key}" if group else None


class Grouped(ABC):
    """Sends numbers by their grouped names."""

    package: ClassVar[str]
    """The name of its package, for `import` and for `pip install`."""

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a training step."""
        named = {grouped_name(key): value for key, value in record.items() if _is_number(value)}
        named.pop(None, None)
        self.send(named, "step", record["step"])

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Send the accuracies of an evaluation, on the axis of the version that it evaluated."""
        named = {
            f"eval/{name}/{key}": value
            for name, scores in {record["name"]: record, **record.get("sets", {})}.items()
            for key, value in _accuracies(scores).items()
            if _is_number(value)
        }
        self.send(named, "eval/version", record["version"])

    @abstractmethod
    def send(self, metrics: dict[Any, float], axis: str, at: int) -> None:
        """Send numbers at a place of an axis, `step` or `eval/version`."""

    @abstractmethod
    def finish(self) -> None:
        """Send what is left, and end the run."""


class TensorBoard(Grouped):
    """Write event files to tensorboard/ in the run directory; `arguments` go to SummaryWriter."""

    package = "tensorboard"

    def __init__(self, run_dir: Path, run_config: Mapping[str, Any], **arguments: Any):
        self._arguments = {"log_dir": str(run_dir / "tensorboard"), **arguments}
        self._writer: Any = None

    def send(self, metrics: dict[Any, float], axis: str, at: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier start wrote beyond the step where this one goes on is hidden. The
            # training step of the version that an evaluation is of stays.
            first = at if axis == "step" else at + 1
            self._writer = SummaryWriter(purge_step=first, **self._arguments)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, at)
        self._writer.flush()

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Mlflow(Grouped):
    """Send metrics to MLflow; `arguments` go to mlflow.start_run."""

    package = "mlflow"

    def __init__(
        self,
        run_dir: Path,
        run_config: Mapping[str, Any],
        tracking_uri: str | None = None,
        experiment: str = _PROJECT,
        **arguments: Any,
    ):
        mlflow = self._mlflow = importlib.import_module(self.package)
        if tracking_uri is not None:
            mlflow.set_tracking_uri(tracking_uri)
        elif "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{run_dir.absolute()}/mlflow.db")
        mlflow.set_experiment(experiment)
        file = run_dir / "mlflow-run"
        known = file.read_text() if file.exists() else None
        run = mlflow.start_run(run_id=known, **{"run_name": run_dir.name, **arguments})
        if known is None:
            write_atomically(file, run.info.run_id)
            mlflow.log_dict(dict(run_config), "config.json")

    def send(self, metrics: dict[Any, float], axis: str, at: int) -> None:
        self._mlflow.log_metrics(metrics, step=at)

    def finish(self) -> None:
        self._mlflow.end_run()


class _LikeWandb(Grouped):
    """A package with the calls of wandb. `arguments` go to its `init`."""

    def __init__(self, run_dir: Path, run_config: Mapping[str, Any], **arguments: Any):
        self._package: Any = importlib.import_module(self.package)
        defaults = {"project": _PROJECT, "config": dict(run_config), "resume": "allow"}
        self._package.init(**defaults | self._own(run_dir) | arguments)

    @abstractmethod
    def _own(self, run_dir: Path) -> dict[str, Any]:
        """Return the arguments of `init` that say which run this is."""

    def send(self, metrics: dict[Any, float], axis: str, at: int) -> None:
        self._package.log(metrics, step=at)

    def finish(self) -> None:
        self._package.finish()


class Wandb(_LikeWandb):
    """Send metrics to Weights & Biases."""

    package = "wandb"

    def __init__(self, run_dir: Path, run_config: Mapping[str, Any], **arguments: Any):
        super().__init__(run_dir, run_config, **arguments)
        for group in (*filter(None, GROUPS), OTHER):
            self._package.define_metric(f"{group}/*", step_metric="step")
        self._package.define_metric("eval/*", step_metric="eval/version")

    def _own(self, run_dir: Path) -> dict[str, Any]:
        return {
            "project": os.environ.get("WANDB_PROJECT", _PROJECT),
            "name": run_dir.name,
            "id": os.environ.get("WANDB_RUN_ID") or _own_id(run_dir / "wandb"),
            "dir": str(run_dir),
            "settings": self._package.Settings(init_timeout=_INIT_TIMEOUT_S),
        }

    def send(self, metrics: dict[Any, float], axis: str, at: int) -> None:
        """Send numbers without wandb's own step: that must rise, and an evaluation's does not."""
        self._package.log({**metrics, axis: at})


class Trackio(_LikeWandb):
    """Send metrics to Trackio."""

    package = "trackio"

    def _own(self, run_dir: Path) -> dict[str, Any]:
        return {"name": f"{run_dir.name}-{_own_id(run_dir / 'trackio')}"}


class Swanlab(_LikeWandb):
    """Send metrics to SwanLab."""

    package = "swanlab"

    def _own(self, run_dir: Path) -> dict[str, Any]:
        folder = run_dir / "swanlab"
        return {"name": run_dir.name, "id": _own_id(folder), "log_dir": str(folder)}


def _own_id(folder: Path) -> str:
    """Return the id of the run in a tracker, which its first start chooses."""
    file = folder / "id"
    if not file.exists():
        folder.mkdir(exist_ok=True)
        write_atomically(file, secrets.token_hex(4))
    return file.read_text()


def _accuracies(scores: Mapping[str, Any]) -> dict[str, Any]:
    passes = {f"pass_at_{k}": value for k, value in scores.get("pass_at_k", {}).items()}
    return {**passes, "greedy": scores.get("greedy"), "sampled": scores.get("sampled")}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
