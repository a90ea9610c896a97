"""Sweeps: with `-m`, `key=a,b` stands for each of its values in turn, as Hydra's `--multirun`."""

import itertools

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override


def sweep(overrides: list[str], run_dir: str | None) -> list[list[str]]:
    """Return the overrides of each run; the values of the last key vary fastest.

    Run i gets run_dir=<base>/i, where the base is the overrides' own run_dir or else `run_dir`. If
    that is None, no run directory is set. choice(), range() and glob(*) are understood too.
    Raises ValueError when nothing varies, or when run_dir does.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    own = [override for override in parsed if override.key_or_group == "run_dir"]
    if any(override.is_sweep_override() for override in own):
        raise ValueError("-m: each run gets its own folder in run_dir: give one run_dir")
    if not any(override.is_sweep_override() for override in parsed):
        raise ValueError("-m: no setting has several values: write key=a,b")
    varied = (_alternatives(override) for override in parsed if override not in own)
    runs = [list(combination) for combination in itertools.product(*varied)]
    if run_dir is None:
        return runs
    base = own[-1].value() if own else run_dir
    return [[*run, f"run_dir={base}/{number}"] for number, run in enumerate(runs)]


def _alternatives(override: Override) -> list[str]:
    """Return the overrides, one for each value, that `override` stands for."""
    if not override.is_sweep_override():
        return [override.input_line or ""]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
