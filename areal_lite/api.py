"""Train from a script or a notebook, as `areal-lite train` does (docs/python.md).

Both compose and check the same settings and launch the same run. Mistakes in the settings and
failures of the run are exceptions here, and exit statuses there.
"""

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from areal_lite.cli import checked_config, import_from_working_directory
from areal_lite.config.command_line import as_overrides, explain
from areal_lite.launch.local import OnStep, train_and_report
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, HF_DIR, SUMMARY_FILE
from areal_lite.run_dir.resume import lock_run_dir

Settings = Iterable[str] | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The directory of a run that ended, and the content of its summary.json."""

    run_dir: Path
    summary: dict[str, Any]

    @property
    def model(self) -> Path:
        """Return the folder of the trained weights, in Hugging Face format."""
        return self.run_dir / CHECKPOINTS_DIR / HF_DIR


def train(settings: Settings, on_step: OnStep | None = None) -> TrainResult:
    """Train on this machine until the last step, or until the run is asked to stop.

    Call this in the main thread, which receives signals. settings: overrides as on the command line
    (`["model=…", "trainer.steps=20"]`), or the same as a dictionary; on_step: called with each new
    line of metrics.jsonl, and its exception ends the run. Raises ValueError for wrong settings, and
    RuntimeError or TimeoutError when a process of the run fails.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("areal_lite.train works in the main thread only: call it there")
    if isinstance(settings, str):
        raise ValueError(f"settings={settings!r}: give a list of overrides or a dictionary")
    overrides = as_overrides(settings) if isinstance(settings, Mapping) else list(settings)
    import_from_working_directory()
    try:
        config = checked_config("train", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error, "train")) from error
    run_dir = Path(config.run_dir)
    with lock_run_dir(run_dir):
        train_and_report(config, on_step)
        summary = json.loads((run_dir / SUMMARY_FILE).read_text())
    return TrainResult(run_dir=run_dir, summary=summary)
