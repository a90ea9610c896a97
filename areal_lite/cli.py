"""`areal-lite COMMAND [Hydra overrides]`, the same as `python -m areal_lite`.

Exit statuses: 0 for success, 1 for a run that failed, 2 for a mistake in the command line, 130 for
an interrupted run, 141 if the reader of a pipe (such as `head`) has left. The configuration is
composed and checked before anything heavy is imported, and a mistake is one line on stderr.
"""

import os
import select
import sys
from collections.abc import Callable
from typing import Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_lite import extensions
from areal_lite.config import TrainConfig, command_names, find_command
from areal_lite.config.command_line import (
    compose_config,
    did_you_mean,
    explain,
    one_line,
    overrides_of,
    switches,
)
from areal_lite.config.help import about_section, groups_text, help_text, show
from areal_lite.extensions import load_object
from areal_lite.system.processes import visible

_HELP = ("--help", "-h")
_NO_READER = 141  # what a shell shows of a program that SIGPIPE has ended
_FLAGS = (*_HELP, "--cfg")


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in _HELP:
        abouts = {name: about_section(find_command(name).schema) for name in command_names()}
        rows = "\n".join(f"  {name:<12}{about}" for name, about in abouts.items())
        more = "`areal-lite COMMAND --help` lists its settings."
        try:
            print(f"usage: areal-lite COMMAND [key=value …]\n\n{rows}\n\n{more}", flush=True)
        except OSError as error:
            return _failed(error, 2)
        return 0 if args else 2
    if args[0] not in (names := command_names()):
        hint = did_you_mean(args[0], names) or f"choose one of {', '.join(names)}"
        return _fail(f"unknown command {args[0]!r}; {hint}")
    return run_command(args[0], args[1:])


def run_command(command: str, args: list[str]) -> int:
    """Run a command, or a stage of one, and return its exit status."""
    try:
        import_from_working_directory()
        flags, overrides = parse(command, args)
        overrides = [*_first_overrides(command, flags, overrides), *overrides]
        if not flags.isdisjoint(_HELP):
            print(_help(command, compose_config(command, overrides)), flush=True)
            return 0
        if "--cfg" in flags:
            print(OmegaConf.to_yaml(compose_config(command, overrides)), end="", flush=True)
            return 0
        config = checked_config(command, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        return _fail(explain(error, command))
    except RecursionError:
        return _fail("an override has too many brackets in each other")
    except (ValueError, OSError) as error:
        return _failed(error, 2)
    except KeyboardInterrupt:
        return 130
    return _run(command, flags, config)


def checked_config(command: str, overrides: list[str]) -> Any:
    """Compose and check the configuration of `command`. Cautions go to stderr.

    Raises ValueError for a broken rule, and an error of Hydra or OmegaConf for a bad override.
    """
    composed = compose_config(command, overrides)
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise ValueError(
            f"{missing[0]} is not set: add {missing[0]}=… "
            f"(`{find_command(command).written(command)} --help` lists all settings)"
        )
    config = OmegaConf.to_object(composed)
    from areal_lite.launch.preflight import check_config

    for caution in check_config(find_command(command), config):
        show(f"caution: {caution}", len("caution: "), sys.stderr)
    return config


def import_from_working_directory() -> None:
    """Let users name modules of the working directory, as `python -m` and all roles of a run do."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise ValueError("the working directory is gone: change to another one") from None
    if folder not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, folder)


def parse(command: str, args: list[str]) -> tuple[set[str], list[str]]:
    """Return the flags and the overrides in `args`. Raises ValueError if one is unknown."""
    switched, modes = switches(command), find_command(command).modes
    flags = {arg for arg in args if arg.startswith("-")}
    known = (*_FLAGS, *modes, *switched)
    for flag in sorted(flags.difference(known)):
        for other in command_names():
            if mode := find_command(other).modes.get(flag):
                raise ValueError(f"{flag} is for `areal-lite {other}`, where it {mode.does}")
        hint = did_you_mean(flag, known) or f"choose one of {', '.join(known)}"
        raise ValueError(f"unknown option {flag}; {hint}")
    others = [switched.get(arg, arg) for arg in args if arg not in flags or arg in switched]
    if "--cfg" in flags and "job" in others:  # Hydra's `--cfg job`
        others.remove("job")
    return flags, overrides_of(command, others)


def _first_overrides(command: str, flags: set[str], overrides: list[str]) -> list[str]:
    """Return the overrides that the command and its options put in front of the user's."""
    about = find_command(command)
    first = load_object("adapt", about.adapt)(overrides) if about.adapt else []
    return [*first, *(s for flag in about.modes.keys() & flags for s in about.modes[flag].settings)]


def _run(command: str, flags: set[str], config: Any) -> int:
    from areal_lite.launch.roles import interruptible

    try:
        with interruptible():
            status = _entry(command, flags)(config)
            print(end="", flush=True)  # an error at exit would have no handler
            return status
    except (RuntimeError, TimeoutError) as error:  # often of a process, with the end of its log
        print(f"areal-lite: {visible(str(error))}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        return 130


def _entry(command: str, flags: set[str]) -> Callable[[Any], int]:
    """Import the entry of a command or of its option. Raises ValueError if it is not installed."""
    about = find_command(command)
    flag = next((flag for flag in about.modes if flag in flags), "")
    entry = about.modes[flag].entry if flag else about.entry
    if entry:
        return load_object("entry", entry)
    if found := extensions.load(extensions.MODES, flag.removeprefix("--")):
        return found
    raise ValueError(f"{flag} needs the tools of areal-lite: install areal-lite with them")


def _help(command: str, composed: Any) -> str:
    """Return the usage of a command, the sets of settings it can use, and its settings."""
    about = find_command(command)
    written = about.written(command)
    words = f"[{about.words[1]}] " if about.words else ""
    usages = {
        f"{words}[key=value …]": "",
        "--cfg job [key=value …]": "prints the settings and their values",
    }
    for switch, override in switches(command).items():
        usages[switch] = override
    for flag, mode in about.modes.items():
        usages[f"{flag} [key=value …]"] = mode.does
    lines = [
        f"{'usage:' if not does else '':<7}{written} {usage:<26}{does}".rstrip()
        for usage, does in usages.items()
    ]
    parts = [f"{written}: {about_section(about.schema)}", "\n".join(lines)]
    if issubclass(about.schema, TrainConfig):
        parts.append(f"sets of settings:\n{groups_text()}")
    settings = "settings and their values; in brackets, the values that are allowed:"
    return "\n\n".join([*parts, settings, help_text(command, composed)])


def _failed(error: ValueError | OSError, status: int) -> int:
    """Say what is wrong and return `status`, or drop the output that nobody reads any more."""
    if isinstance(error, BrokenPipeError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _NO_READER
    if isinstance(error, OSError) and error.filename is not None:
        return _fail(f"{error.filename}: {error.strerror}", status)  # a full disk, a permission
    return _fail(str(error), status)


def _fail(message: str, status: int = 2) -> int:
    """Print one line and return `status`."""
    print(f"areal-lite: {one_line(message)}", file=sys.stderr)
    return status
