"""Predict a run: `python -m benchmarks.simulate [key=value …]`."""

import sys

from areal_lite.cli import run_command

if __name__ == "__main__":
    sys.exit(run_command("simulate", sys.argv[1:]))
