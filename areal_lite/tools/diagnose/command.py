"""Run `areal-lite diagnose`: print the problems of a run."""

import shutil
import sys
import textwrap
from pathlib import Path

from areal_lite.tools.commands import DiagnoseConfig
from areal_lite.tools.diagnose.diagnosis import diagnosis_text
from areal_lite.tools.diagnose.history import read_history
from areal_lite.tools.report.command import chosen_run


def run(config: DiagnoseConfig) -> int:
    """Print the findings about a run, wrapped to the width of a terminal."""
    text = diagnosis_text(read_history(Path(chosen_run(config))))
    print(wrapped(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)
    return 0


def wrapped(text: str, width: int) -> str:
    """Break long lines between words. What follows is below the words of the first part."""
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())
