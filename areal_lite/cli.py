"""`areal-lite COMMAND [Hydra overrides]`, the same as `python -m areal_lite`.

The configuration is composed and checked before anything heavy is imported: a mistake is one line on stderr and exit status 2.
A run that fails exits with 1, an interrupted one with 130.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_lite.config import COMMANDS, register, to_dataclass

# command -> (module with run(config) -> exit status, what it does)
_RUN = {
    "train": ("areal_lite.launch.local", "reinforcement learning: servers, controller and trainer on this machine"),
    "quickstart": ("areal_lite.launch.quickstart", "make-model, sft and train of a small model on the addition task"),
    "make-model": ("areal_lite.make_model", "write a randomly initialised Qwen3-architecture checkpoint and its tokenizer"),
    "sft": ("areal_lite.launch.sft", "warm a model up on demonstrations of an imperfect teacher"),
    "eval": ("areal_lite.launch.evaluate", "greedy accuracy and pass@k of a checkpoint on held-out problems"),
    "generate": ("areal_lite.launch.evaluate", "try prompts on a checkpoint"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0 if args else 2
    command, overrides = args[0], args[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        return _fail(f"unknown command {command!r}" + (f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(COMMANDS)}"))
    show = next((flag for flag in ("--help", "-h", "--cfg") if flag in overrides), None)
    try:
        composed = _compose(command, [o for o in overrides if o not in ("--help", "-h", "--cfg", "job")])
        if show:
            print(_help(command, composed) if show != "--cfg" else OmegaConf.to_yaml(composed), end="")
            return 0
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            return _fail(f"{missing[0]} is not set: add {missing[0]}=… (`areal-lite {command} --help` lists all settings)")
        config = to_dataclass(composed)
        from areal_lite.validate import validate

        validate(config)
    except (HydraException, OmegaConfBaseException) as error:
        return _fail(_one_line(error, command))
    except ValueError as error:
        return _fail(str(error))
    from areal_lite.launch.roles import interruptible

    try:
        with interruptible():
            return importlib.import_module(_RUN[command][0]).run(config)
    except ValueError as error:
        return _fail(str(error), status=1)
    except KeyboardInterrupt:
        return 130


def config_dir() -> Path:
    """conf/ of a checkout, or the copy inside an installed package."""
    package = Path(__file__).resolve().parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def _compose(command: str, overrides: list[str]) -> Any:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose(command, overrides)


def _one_line(error: Exception, command: str) -> str:
    """Hydra's errors are several lines and their cause: keep what a user needs, and name the key that was probably meant."""
    text = " ".join(str(error).split())
    cause = error.__cause__
    unknown = re.search(r"Key '([^']+)' (?:is not in struct|not in '[^']+').*?full_key: (\S+)", f"{text} {cause or ''}", re.S)
    if unknown:
        key = unknown.group(2)
        near = difflib.get_close_matches(key, _keys(command), 1, cutoff=0.5)
        return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else f"; `areal-lite {command} --help` lists all settings")
    detail = " ".join(str(cause).split()) if cause else ""
    return re.sub(r" full_key: \S+| object_type=\S+| reference_type=\S+", "", f"{text} {detail}".strip())


def _keys(command: str) -> list[str]:
    def walk(node: Any, prefix: str) -> list[str]:
        found = []
        for key in node:
            name = f"{prefix}{key}"
            child = None if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) else node[key]
            found += [name, *(walk(child, f"{name}.") if OmegaConf.is_dict(child) else [])]
        return found

    return walk(OmegaConf.structured(COMMANDS[command]), "")


def _usage() -> str:
    rows = "\n".join(f"  {name:<12}{text}" for name, (_, text) in _RUN.items())
    return f"usage: areal-lite COMMAND [key=value …]\n\n{rows}\n\n`areal-lite COMMAND --help` lists its settings."


def _help(command: str, composed: Any) -> str:
    groups = []
    for folder in sorted(path for path in config_dir().iterdir() if path.is_dir()):
        options = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        groups.append(f"  {'+' if folder.name == 'experiment' else ''}{folder.name}={{{options}}}")
    text = f"areal-lite {command}: {_RUN[command][1]}\n\nusage: areal-lite {command} [key=value …]      (--cfg prints the composed settings alone)\n"
    if command in ("train", "quickstart"):
        text += "\nsets of settings:\n" + "\n".join(groups) + "\n"
    return text + "\nsettings and their values (what each is for: areal_lite/config.py):\n\n" + OmegaConf.to_yaml(composed)


def _fail(message: str, status: int = 2) -> int:
    print(f"areal-lite: {message}", file=sys.stderr)
    return status
