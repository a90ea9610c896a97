"""From the words of a command line to composed settings, by Hydra, and what was wrong with them.

    areal-lite chat model --raw              is  areal-lite chat model=model raw=true
    areal-lite report runs/a runs/b          is  areal-lite report runs=[runs/a,runs/b]

A word without `=` is a folder, for commands with `words`: a run, or for `chat` also a model.
`--NAME` is `NAME=true`, for every setting of a command that is true or false.
"""

import json
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from areal_lite.config.commands import find_command
from areal_lite.config.fields import did_you_mean, keys_of, settings_of
from areal_lite.config.files import flat
from areal_lite.config.sections import TRUNCATED_SAMPLING, WHOLE_VOCABULARY, Sampling
from areal_lite.system.processes import visible

# Groups of conf/ from which nothing is chosen by default: `+experiment=NAME`.
ADDED_GROUPS = ("experiment", "task")


def config_dir() -> Path:
    """Return the folder conf/ of a checkout, or its copy inside an installed package."""
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


@cache
def _register(command: str) -> DictConfig:
    """Register the schema of `command` with Hydra, once per process, and return it.

    conf/COMMAND.yaml, if there is one, extends it under the name COMMAND_schema. The resolver
    `${token:}` makes a random key.
    """
    OmegaConf.register_new_resolver(
        "token", lambda: secrets.token_hex(16), use_cache=True, replace=True
    )
    schema = OmegaConf.structured(find_command(command).schema)
    extended = (config_dir() / f"{command}.yaml").exists()
    ConfigStore.instance().store(name=f"{command}_schema" if extended else command, node=schema)
    return schema


def compose_config(command: str, overrides: list[str]) -> DictConfig:
    """Compose the settings of `command`. Raises errors of Hydra or OmegaConf (see `explain`)."""
    schema = _register(command)
    # Hydra requires ++ for a new key.
    marked = [
        f"++{override}" if _is_own_key(override.partition("=")[0], command) else override
        for override in overrides
    ]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = compose(command, marked)
    # Hydra accepts any +key=value. This refuses a key that the schema does not have.
    OmegaConf.merge(schema, OmegaConf.to_container(composed))
    return composed


def _is_own_key(key: str, command: str) -> bool:
    """Return whether users choose a key, or what it holds, such as in server.args."""
    kinds = keys_of(find_command(command).schema).items()
    return f"{key}.".startswith(tuple(f"{own}." for own, kind in kinds if get_origin(kind) is dict))


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as overrides: `{"trainer": {"steps": 5}}` as `trainer.steps=5`.

    A key may have sections in it (`"trainer.steps"`), and a value may name a file of conf/
    (`"schedule": "sync"`), as on the command line.
    """
    named = flat(settings).items()
    return [f"{key}={_text_of(value)}" for key, value in named if key]  # no key: no settings


def _text_of(value: Any) -> str:
    """Write a value in Hydra's grammar of overrides."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_text_of, value))}]"
    return quoted(str(value))


def switches(command: str) -> dict[str, str]:
    """Return by option, such as `--follow`, the override that it stands for."""
    keys = keys_of(find_command(command).schema)
    names = [key for key, kind in keys.items() if kind is bool and "." not in key]
    return {f"--{name.replace('_', '-')}": f"{name}=true" for name in names}


def overrides_of(command: str, args: list[str]) -> list[str]:
    """Return the overrides for arguments without options. Raises ValueError for too many words."""
    if (found := find_command(command)).words is None:
        return args  # Hydra says what is wrong with a word
    # `~key` is Hydra's way to remove a key.
    words = [arg for arg in args if "=" not in arg and not arg.startswith("~")]
    overrides = [arg for arg in args if arg not in words]
    key, _ = found.words
    if not words:
        return overrides
    if keys_of(found.schema)[key] == list[str]:
        return [f"{key}=[{','.join(map(quoted, words))}]", *overrides]
    if len(words) > 1:
        raise ValueError(f"areal-lite {command} takes one folder, not {len(words)}: {words[1]}")
    is_model = (Path(words[0]) / "config.json").is_file()
    if key == "model" and "run_dir" in keys_of(found.schema) and not is_model:
        key = "run_dir"
    return [f"{key}={quoted(words[0])}", *overrides]


def quoted(text: str) -> str:
    """Quote text for Hydra, where only backslashes before a quote or at the end are special."""
    doubled = re.sub(r"(\\+)(?=\"|$)", r"\1\1", text)
    return '"' + doubled.replace('"', r"\"") + '"'


_UNKNOWN_KEY = re.compile(
    r"Key '([^']+)' (?:is not in struct|not in '[^']+').*?full_key: (\S+)", re.S
)
_UNKNOWN_OPTION = re.compile(
    r"Could not find '([^/']+)/([^']*)'.*Available options in '\1': (.+?)"
    r"(?: Config search path|$)"
)
# A pattern of a message and what is said instead, once `_NOISE` is out of the message.
_REWORDED = {
    r"Error parsing override '(.+)' missing EQUAL.*": r"\1 has no value: write \1=…",
    r"Could not override '.+'\. No match .* use \+(\S+)": r"\1 would add settings: use +\1",
    r"Error merging override ([^=]+)=(.*?) Invalid type assigned: NoneType is not .*": (
        r"\1=\2: a list of texts has no null: leave it out"
    ),
    r"Error merging override ([^=]+)=(.*?) Invalid type assigned: .* is not a subclass of .*": (
        r"\1=\2: \1 is a section: set its keys, \1.KEY=VALUE"
    ),
    r"Error merging override ([^=]+)=(.*?) Invalid value assigned: .* is not a ListConfig.*": (
        r"\1=\2: write a list, \1=[\2]"
    ),
    r"Error merging override (.+?) ((?:Value|Cannot|Invalid) .*?)(?: full_key: \S+)?": r"\1: \2",
    r"(Interpolation key '(\S+)' not found) full_key: (\S+)": (
        r"\3: \1; for the text itself write \\${\2}"
    ),
    r"(.*) full_key: (\S+)": r"\2: \1",
}
_NOISE = re.compile(
    # The mark of compose.py at a new key, and what OmegaConf and Hydra append.
    r"(?<=override )\+\+|(?<=override ')\+\+"
    r"| (?:object|reference)_type=(?:Dict\[str, Any\]|\S+)| See https://hydra\S+(?: for details)?"
)
_SHOWN, _LONGEST = 100, 2000  # characters of an override, and of a whole message


def explain(error: Exception, command: str) -> str:
    """Say in one line what is wrong with an override, given the error of Hydra or OmegaConf."""
    cause = f" {error.__cause__}" if error.__cause__ else ""
    text = _NOISE.sub("", " ".join(f"{error}{cause}".split()))
    if unknown := _UNKNOWN_KEY.search(text):
        written = re.match(r"Could not override '([^']+)'", text)  # it may lie in no section
        return _unknown_key(unknown[2], command, (written or unknown)[1])
    if unknown := _UNKNOWN_OPTION.search(text):
        group, name, options = unknown.group(1), unknown.group(2), unknown.group(3).split()
        hint = did_you_mean(name, options)
        return f"unknown {group}={name}; {f'{hint} ' if hint else ''}there are {', '.join(options)}"
    if several := re.match(r"Ambiguous value for argument '(.+?)'\s1\. ", str(error), re.DOTALL):
        return f"{several[1]} is several values: {_how_to_type(several[1], command, 'give one')}"
    if listed := re.match(r"Error merging override (.+) Cannot convert '\w+' to string", text):
        return f"{listed[1]} is not text: {_how_to_type(listed[1], command)}"
    for pattern, reworded in _REWORDED.items():
        if match := re.fullmatch(pattern, text):
            return match.expand(reworded)
    if isinstance(error, OverrideParseException):
        override = error.override.removeprefix("++")
        return f"cannot read {override[:_SHOWN]}: {_how_to_type(override, command)}"
    return text


def _how_to_type(override: str, command: str, unless: str = "check its brackets and quotes") -> str:
    """Say what to type in a shell instead of an override that Hydra misreads, `unless` unclear."""
    key, equals, value = (part.strip() for part in override.partition("="))
    if not key or not equals:
        return "write KEY=VALUE"
    kind = keys_of(find_command(command).schema).get(key)
    if kind in (str, str | None) or (kind is None and _is_own_key(key, command)):
        if value.startswith("~/"):
            return f'type "{key}=$HOME{value[1:]}"'
        typed = quoted(value)
    elif get_origin(kind) is list and "[" not in value:
        typed = f"[{','.join(map(quoted, value.split(',')))}]"
    else:
        typed = re.sub(r"""["'](\w+)["'](?=\s*:)""", r"\1", value.lstrip("= "))  # as in JSON
    return unless if f"{key}={typed}" == override else f"type {_in_shell(f'{key}={typed}')}"


def _in_shell(text: str) -> str:
    """Quote text for bash, on one line."""
    if text.isprintable():
        return shlex.quote(text)
    escapes = {ord("\n"): r"\n", ord("\t"): r"\t", ord("'"): r"\'", ord("\\"): r"\\"}
    return f"$'{text.translate(escapes)}'"


def one_line(message: str) -> str:
    """Return the message on one line. A long one loses its middle."""
    line = visible(" ".join(message.split()))
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} … {line[-half:]}"


def _unknown_key(key: str, command: str, whole: str) -> str:
    """Name the keys that end as the `whole` key does, or else the one most similar to `key`."""
    last = whole.rpartition(".")[2]
    written = find_command(command).written(command)
    keys = [*keys_of(find_command(command).schema), *(f"+{group}" for group in ADDED_GROUPS)]
    mappings = [known for known in keys if known.rpartition(".")[2] == "sampling"]
    keys += [f"{mapping}.{name}" for mapping in mappings for name in settings_of(Sampling)]
    same_end = [known for known in keys if known.rpartition(".")[2] == last]
    hint = f"did you mean {' or '.join(same_end)}?" if same_end else did_you_mean(key, keys)
    if last in TRUNCATED_SAMPLING:
        hint = f"{WHOLE_VOCABULARY}; {hint}" if same_end else WHOLE_VOCABULARY
    return f"unknown key {key}; {hint or f'`{written} --help` lists all settings'}"
