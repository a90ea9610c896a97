"""Run `areal-lite diagnose`: print the problems of a run."""

from pathlib import Path

from areal_lite.config.report import DiagnoseConfig
from areal_lite.diagnose.diagnosis import diagnosis_text
from areal_lite.diagnose.history import read_history
from areal_lite.report.commands import chosen_run


def run(config: DiagnoseConfig) -> int:
    """Print the findings about a run."""
    print(diagnosis_text(read_history(Path(chosen_run(config)))))
    return 0
