"""`-m`: several runs of one command line, in which `key=a,b` stands for each of its values in turn, as in Hydra's `--multirun`."""

from __future__ import annotations

import itertools

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override


def sweep(overrides: list[str], run_dir: str | None) -> list[list[str]]:
    """The overrides of each run, the last key's values varying fastest. Run i gets run_dir=<run_dir>/i, of the override or else the one given.

    Also understood: choice(), range(), glob(*). Raises ValueError when nothing varies, or a run directory does.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    own = [override for override in parsed if override.key_or_group == "run_dir"]
    if any(override.is_sweep_override() for override in own):
        raise ValueError("-m: each run gets a folder of its own in run_dir: give one run_dir")
    if not any(override.is_sweep_override() for override in parsed):
        raise ValueError("-m: no setting has several values: write key=a,b")
    combinations = itertools.product(
        *(_values(override) for override in parsed if override not in own)
    )
    if run_dir is None:
        return [list(combination) for combination in combinations]
    base = own[-1].value() if own else run_dir
    return [
        [*combination, f"run_dir={base}/{number}"]
        for number, combination in enumerate(combinations)
    ]


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [override.input_line]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
