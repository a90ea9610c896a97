"""`areal-lite COMMAND [Hydra overrides]`, the same as `python -m areal_lite`.

The configuration is composed and checked before anything heavy is imported: a mistake is one line on stderr and exit status 2.
A run that fails exits with 1, an interrupted one with 130.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_lite.config import COMMANDS, to_dataclass
from areal_lite.config.compose import ADDED_GROUPS, compose_config, config_dir, explain

# command -> (module with run(config) -> exit status, what it does)
_RUN = {
    "train": (
        "areal_lite.launch.local",
        "reinforcement learning: servers, controller and trainer on this machine",
    ),
    "quickstart": (
        "areal_lite.quickstart.quickstart",
        "make-model, sft and train of a small model on the addition task",
    ),
    "make-model": (
        "areal_lite.quickstart.make_model",
        "write a small, randomly initialised checkpoint and its tokenizer",
    ),
    "sft": (
        "areal_lite.quickstart.launch_sft",
        "warm a model up on demonstrations of an imperfect teacher",
    ),
    "eval": (
        "areal_lite.launch.evaluate",
        "greedy accuracy and pass@k of a checkpoint on held-out problems",
    ),
    "generate": ("areal_lite.launch.evaluate", "try prompts on a checkpoint"),
    "slurm": (
        "areal_lite.launch.slurm",
        "submit a training run to Slurm: servers, controller and trainer on many nodes",
    ),
    "prepare": (
        "areal_lite.launch.prepare",
        "write the run directory of a training run whose roles are started one by one",
    ),
}
# flag -> (its command, what runs instead, what it does)
_INSTEAD = {
    "--dry-run": (
        "train",
        "areal_lite.launch.dry_run:run",
        "checks everything, shows the plan and what it needs, starts nothing",
    ),
    "--print": ("slurm", "areal_lite.launch.slurm:show", "prints the job, submits nothing"),
}
_SHOW = ("--help", "-h", "--cfg")
_SWEEP = ("-m", "--multirun")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(
            0, os.getcwd()
        )  # as `python -m` does, by which all other processes of a run start
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0 if args else 2
    command, overrides = args[0], args[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        return _fail(
            f"unknown command {command!r}"
            + (f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(COMMANDS)}")
        )
    show, entry, multirun = (
        next((o for o in overrides if o in flags), None) for flags in (_SHOW, _INSTEAD, _SWEEP)
    )
    if entry and command != _INSTEAD[entry][0]:
        return _fail(
            f"{entry} is for `areal-lite {_INSTEAD[entry][0]}`, where it {_INSTEAD[entry][2]}"
        )
    overrides = [o for o in overrides if o not in (*_SHOW, "job", *_INSTEAD, *_SWEEP)]
    try:
        if show:
            composed = compose_config(command, overrides)
            print(
                _help(command, composed) if show != "--cfg" else OmegaConf.to_yaml(composed), end=""
            )
            return 0
        if multirun:
            from areal_lite.launch.sweep import sweep

            configs = [
                checked_config(command, one)
                for one in sweep(overrides, compose_config(command, []).get("run_dir"))
            ]
        else:
            configs = [checked_config(command, overrides)]
    except (HydraException, OmegaConfBaseException) as error:
        return _fail(explain(error, command))
    except ValueError as error:
        return _fail(str(error))
    from areal_lite.launch.roles import interruptible

    try:
        with interruptible():
            module, _, name = (_INSTEAD[entry][1] if entry else _RUN[command][0]).partition(":")
            run = getattr(importlib.import_module(module), name or "run")
            return next((status for config in configs if (status := run(config))), 0)
    except ValueError as error:
        return _fail(str(error), status=1)
    except KeyboardInterrupt:
        return 130


def checked_config(command: str, overrides: list[str]) -> Any:
    """The configuration, complete and valid."""
    composed = compose_config(command, overrides)
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise ValueError(
            f"{missing[0]} is not set: add {missing[0]}=… (`areal-lite {command} --help` lists all settings)"
        )
    config = to_dataclass(composed)
    from areal_lite.launch.preflight import check_config

    check_config(config)
    return config


def _usage() -> str:
    rows = "\n".join(f"  {name:<12}{text}" for name, (_, text) in _RUN.items())
    return f"usage: areal-lite COMMAND [key=value …]\n\n{rows}\n\n`areal-lite COMMAND --help` lists its settings."


def _help(command: str, composed: Any) -> str:
    groups = []
    for folder in sorted(path for path in config_dir().iterdir() if path.is_dir()):
        options = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        groups.append(f"  {'+' if folder.name in ADDED_GROUPS else ''}{folder.name}={{{options}}}")
    text = f"areal-lite {command}: {_RUN[command][1]}\n\nusage: areal-lite {command} [key=value …]      (--cfg prints the composed settings alone)\n"
    for flag, (of, _, does) in _INSTEAD.items():
        if of == command:
            text += f"       areal-lite {command} {flag} [key=value …]      {does}\n"
    if command in ("train", "quickstart", "slurm", "prepare"):
        text += f"       areal-lite {command} -m [key=value,value …]      one run after the other, for each combination of the values\n"
        text += "\nsets of settings:\n" + "\n".join(groups) + "\n"
    return (
        text
        + "\nsettings and their values (what each is for: areal_lite/config/schema.py and config_algo.py):\n\n"
        + OmegaConf.to_yaml(composed)
    )


def _fail(message: str, status: int = 2) -> int:
    print(f"areal-lite: {message}", file=sys.stderr)
    return status
