"""Weights & Biases: the metrics of a run in groups, as long as wandb works.

The axis of a training step's metrics is `step`. An evaluation may end after later steps, so its
axis is `eval/version`, and wandb's own step, which must rise, is not used.

wandb never ends a run: after an error there is one warning, and nothing more is sent. metrics.jsonl
and evals.jsonl have everything.
"""

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_lite.config import LoggerConfig
from areal_lite.system.files import to_plain, write_atomically
from areal_lite.system.processes import start_daemon
from areal_lite.tools.metric_table import GROUP_OF, GROUPS

log = logging.getLogger(__name__)

OTHER = "other"
_INIT_TIMEOUT_S = 60.0
_FINISH_TIMEOUT_S = 120.0


def wandb_name(key: str) -> str | None:
    """Return the name of a metric in wandb; None for one that is not sent there."""
    group = GROUP_OF.get(key.partition("/")[0], OTHER)
    return f"{group}/{key}" if group else None


def _own_id(run_dir: Path) -> str:
    """Return the id of the run in wandb, which its first start chooses."""
    file = run_dir / "wandb" / "id"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, secrets.token_hex(4))
    return file.read_text()


class WandbLog:
    """The run in wandb. Every call returns, whatever wandb does."""

    def __init__(self, run_dir: Path, config: LoggerConfig, run_config: Mapping[str, Any]):
        self._run: Any = None
        self._try("start", lambda: self._start(run_dir, config, run_config))

    def _start(self, run_dir: Path, config: LoggerConfig, run_config: Mapping[str, Any]) -> None:
        import wandb  # it is slow to import, and only needed here

        defaults = {
            "project": os.environ.get("WANDB_PROJECT", "areal_lite"),
            "name": run_dir.name,
            "id": os.environ.get("WANDB_RUN_ID") or _own_id(run_dir),
            "resume": "allow",  # all starts of a run directory are one run
            "dir": str(run_dir),
            "config": to_plain(run_config),
            # None is wandb's default: online, unless the environment has another WANDB_MODE.
            "mode": "offline" if config.wandb == "offline" else None,
            "settings": wandb.Settings(init_timeout=_INIT_TIMEOUT_S),
        }
        self._run = wandb.init(**defaults | to_plain(config.args))
        for group in (*filter(None, GROUPS), OTHER):
            self._run.define_metric(f"{group}/*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="eval/version")

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a training step."""
        named = {wandb_name(key): value for key, value in record.items() if _is_number(value)}
        named.pop(None, None)
        self._try("log", lambda: self._run.log({**named, "step": record["step"]}))

    def log_evaluation(self, record: Mapping[str, Any]) -> None:
        """Send the accuracies of an evaluation, on the axis of the version that it evaluated."""
        named = {
            f"eval/{name}/{key}": value
            for name, scores in {record["name"]: record, **record.get("sets", {})}.items()
            for key, value in _accuracies(scores).items()
            if _is_number(value)
        }
        self._try("log", lambda: self._run.log({**named, "eval/version": record["version"]}))

    def finish(self) -> None:
        """End the run in wandb. What is not sent within two minutes stays in its folder."""
        self._try("end", lambda: start_daemon(self._run.finish).result(_FINISH_TIMEOUT_S))

    def _try(self, action: str, call: Callable[[], object]) -> None:
        if action != "start" and self._run is None:
            return
        try:
            call()
        except Exception as error:  # whatever wandb raises
            self._run = None
            kind = type(error).__name__
            log.warning(
                "wandb could not %s the run, which goes on without it: %s: %s", action, kind, error
            )


def _accuracies(scores: Mapping[str, Any]) -> dict[str, Any]:
    passes = {f"pass_at_{k}": value for k, value in scores.get("pass_at_k", {}).items()}
    return {**passes, "greedy": scores.get("greedy"), "sampled": scores.get("sampled")}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
