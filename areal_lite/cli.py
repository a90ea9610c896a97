"""`areal-lite COMMAND [Hydra overrides]`, the same as `python -m areal_lite`.

Exit statuses: 0 for success, 1 for a run that failed, 2 for a mistake in the command line, 130 for
an interrupted run, 141 if the reader of a pipe (such as `head`) has left. The configuration is
composed and checked before anything heavy is imported, and a mistake is one line on stderr.
"""

import importlib
import os
import select
import sys
from typing import Any, NamedTuple

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_lite.config import COMMANDS, compose_config, to_dataclass
from areal_lite.config.arguments import overrides_of, switches, usage_of_words
from areal_lite.config.errors import did_you_mean, explain, one_line
from areal_lite.launch.placement import quickstart_overrides


class Command(NamedTuple):
    """A command: its help, and `entry` (module:function), called as f(config) -> exit status."""

    entry: str
    does: str


class Mode(NamedTuple):
    """A flag of one command, which runs another entry."""

    command: str
    entry: str
    does: str


_COMMANDS = {
    "train": Command(
        "areal_lite.launch.local:run",
        "train with reinforcement learning on this machine",
    ),
    "quickstart": Command(
        "areal_lite.quickstart.quickstart:run",
        "make, warm up and train a small model on the addition task",
    ),
    "make-model": Command(
        "areal_lite.quickstart.make_model:run",
        "write a small, randomly initialized checkpoint and its tokenizer",
    ),
    "sft": Command(
        "areal_lite.quickstart.launch_sft:run",
        "warm a model up on demonstrations of an imperfect teacher",
    ),
    "eval": Command(
        "areal_lite.tools.evaluate:run",
        "measure greedy accuracy and pass@k of a checkpoint on held-out problems",
    ),
    "generate": Command("areal_lite.tools.evaluate:run", "try prompts on a checkpoint"),
    "chat": Command(
        "areal_lite.tools.chat:run", "talk to a model, or to a run's newest checkpoint"
    ),
    "export": Command(
        "areal_lite.tools.export:run", "write a run's checkpoint as a Hugging Face folder"
    ),
    "report": Command(
        "areal_lite.tools.report.command:report", "write one page about a run, for a browser"
    ),
    "compare": Command(
        "areal_lite.tools.report.command:compare", "write one page about two or more runs"
    ),
    "inspect": Command(
        "areal_lite.tools.report.command:inspect", "print trajectories in the terminal"
    ),
    "trace": Command(
        "areal_lite.tools.report.command:trace", "write a run as a trace for Perfetto"
    ),
    "diagnose": Command(
        "areal_lite.tools.diagnose.command:run",
        "say what is wrong with a run, and which setting to change",
    ),
    "doctor": Command("areal_lite.tools.doctor:run", "check whether runs work on this machine"),
    "audit": Command(
        "areal_lite.tools.audit.command:run", "prove from a run's files that nothing was lost"
    ),
    "slurm": Command(
        "areal_lite.launch.slurm:run",
        "submit a training run to Slurm, for one node or many",
    ),
    "simulate": Command(
        "areal_lite.tools.simulate.command:run",
        "predict a run on machines that are not here: speed, waiting, staleness",
    ),
    "prepare": Command(
        "areal_lite.launch.prepare:run",
        "write the run directory of a training run whose roles are started one by one",
    ),
}
_MODES = {
    "--dry-run": Mode(
        "train",
        "areal_lite.tools.dry_run:run",
        "checks everything, shows the plan, starts nothing",
    ),
    "--print": Mode("slurm", "areal_lite.launch.slurm:show", "prints the job, submits nothing"),
}
_HELP = ("--help", "-h")
_SWEEP = ("--multirun", "-m")
_NO_READER = 141  # what a shell shows of a program that SIGPIPE has ended
_FLAGS = (*_HELP, *_SWEEP, "--cfg", *_MODES)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    import_from_working_directory()
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in _HELP:
        print(_usage())
        return 0 if args else 2
    command = args[0]
    try:
        flags, overrides = parse(command, args[1:])
        if command == "quickstart":
            overrides = [*quickstart_overrides(overrides), *overrides]
        if text := _shown(command, flags, overrides):
            print(text)
            return 0
        configs = _configs(command, flags, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        return _fail(explain(error, command))
    except RecursionError:
        return _fail("an override has too many brackets in each other")
    except (ValueError, OSError) as error:
        return _NO_READER if _reader_left(error) else _fail(_reason(error))
    except KeyboardInterrupt:
        return 130
    modes = [mode.entry for flag, mode in _MODES.items() if flag in flags]
    return _run(modes[0] if modes else _COMMANDS[command].entry, configs)


def checked_config(command: str, overrides: list[str]) -> Any:
    """Compose the configuration of `command`, complete and valid.

    Raises ValueError for a broken rule, and an error of Hydra or OmegaConf for a bad override.
    """
    return check_composed(command, compose_config(command, overrides))


def check_composed(command: str, composed: DictConfig) -> Any:
    """Convert the composed settings of `command` to their dataclass, complete and valid.

    Raises as `checked_config` does.
    """
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise ValueError(
            f"{missing[0]} is not set: add {missing[0]}=… "
            f"(`areal-lite {command} --help` lists all settings)"
        )
    config = to_dataclass(composed)
    from areal_lite.launch.preflight import check_config

    check_config(config)
    return config


def import_from_working_directory() -> None:
    """Let users name modules of the working directory, as `python -m` and all roles of a run do."""
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())


def parse(command: str, args: list[str]) -> tuple[set[str], list[str]]:
    """Return the flags and the overrides in `args`. Raises ValueError for what is unknown."""
    if command not in _COMMANDS:
        hint = did_you_mean(command, _COMMANDS) or f"choose one of {', '.join(_COMMANDS)}"
        raise ValueError(f"unknown command {command!r}; {hint}")
    switched = switches(command)
    flags = {arg for arg in args if arg.startswith("-")}
    known = (*_FLAGS, *switched)
    for flag in sorted(flags.difference(known)):
        hint = did_you_mean(flag, known) or f"choose one of {', '.join(known)}"
        raise ValueError(f"unknown option {flag}; {hint}")
    for flag, mode in _MODES.items():
        if flag in flags and command != mode.command:
            raise ValueError(f"{flag} is for `areal-lite {mode.command}`, where it {mode.does}")
    others = [switched.get(arg, arg) for arg in args if arg not in flags or arg in switched]
    if "--cfg" in flags and "job" in others:  # Hydra's `--cfg job`
        others.remove("job")
    return flags, overrides_of(command, others)


def _shown(command: str, flags: set[str], overrides: list[str]) -> str:
    """Return the text that is asked for instead of a run: the help, the settings, or nothing."""
    if not flags.isdisjoint(_HELP):
        return _help(command, compose_config(command, overrides))
    if "--cfg" in flags:
        return OmegaConf.to_yaml(compose_config(command, overrides)).rstrip("\n")
    return ""


def _configs(command: str, flags: set[str], overrides: list[str]) -> list[Any]:
    """Return the checked configuration of each run."""
    if flags.isdisjoint(_SWEEP):
        return [checked_config(command, overrides)]
    from areal_lite.launch.sweep import sweep

    run_dir = compose_config(command, []).get("run_dir")
    return [checked_config(command, one) for one in sweep(overrides, run_dir)]


def _run(entry: str, configs: list[Any]) -> int:
    """Call `entry` with each configuration until one fails, and return its exit status."""
    from areal_lite.launch.roles import interruptible

    module, _, name = entry.partition(":")
    try:
        with interruptible():
            run = getattr(importlib.import_module(module), name)
            return next((status for config in configs if (status := run(config))), 0)
    except (ValueError, OSError) as error:
        return _NO_READER if _reader_left(error) else _fail(_reason(error), status=1)
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    rows = "\n".join(f"  {name:<12}{command.does}" for name, command in _COMMANDS.items())
    return (
        f"usage: areal-lite COMMAND [key=value …]\n\n{rows}\n\n"
        "`areal-lite COMMAND --help` lists its settings."
    )


def _help(command: str, composed: Any) -> str:
    """Return the usage of a command, the sets of settings it can use, and its settings."""
    from areal_lite.config.reference import groups_text, help_text

    usages = {
        f"{usage_of_words(command)}[key=value …]": "",
        "--cfg job [key=value …]": "prints the settings and their values",
    }
    for switch, override in switches(command).items():
        usages[switch] = override
    for flag, mode in _MODES.items():
        if mode.command == command:
            usages[f"{flag} [key=value …]"] = mode.does
    trains = hasattr(COMMANDS[command], "resume")
    if trains:
        usages["-m [key=a,b …]"] = "runs every combination, one after the other"
    lines = [
        f"{'usage:' if not does else '':<7}areal-lite {command} {usage:<26}{does}".rstrip()
        for usage, does in usages.items()
    ]
    parts = [f"areal-lite {command}: {_COMMANDS[command].does}", "\n".join(lines)]
    if trains:
        parts.append(f"sets of settings:\n{groups_text()}")
    settings = "settings and their values; in brackets, the values that are allowed:"
    return "\n\n".join([*parts, settings, help_text(command, composed)])


def _reason(error: ValueError | OSError) -> str:
    """Say what is wrong. An error of the system names its file: a full disk, a wrong permission."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _reader_left(error: Exception) -> bool:
    """Return whether `error` is a stdout without a reader. If so, drop what is left to write."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    left = any(event & select.POLLERR for _, event in poll.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left


def _fail(message: str, status: int = 2) -> int:
    """Print one line and return `status`."""
    print(f"areal-lite: {one_line(message)}", file=sys.stderr)
    return status
