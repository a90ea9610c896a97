"""Settings: the default, the allowed values and the help of a key, in its dataclass field.

    @dataclass
    class TrainerConfig:
        lr: float = setting(1e-4, "Learning rate.", within=(1e-12, 1))

`null` (None) is allowed where the field's type says so. Every number has two bounds, so NaN and
infinities are never accepted. An upper bound stops a slip of the keyboard, not an experiment.
"""

import difflib
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

_KEY = "setting"

MAX_SEED = 2**31 - 1
MAX_TOKENS = 100_000_000
MAX_COUNT = 1_000_000_000
WEEK_S = 7 * 24 * 3600
SECONDS = (0.001, WEEK_S)

_MAX_CHARACTERS = 100_000


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The help of one key and the values that it accepts."""

    help: str
    choices: tuple[str, ...]
    importable: bool
    within: tuple[float, float] | None

    def accepts(self, value: Any) -> bool:
        """Return whether `value`, or each item of a list, is a choice and within the bounds."""
        if isinstance(value, list):
            return all(map(self.accepts, value))
        if isinstance(value, str):
            own = self.importable and ":" in value
            return _is_text(value) and (not self.choices or value in self.choices or own)
        return not self.within or self.within[0] <= value <= self.within[1]

    @property
    def remedy(self) -> str:
        """Say what to do about a value that is not accepted."""
        if self.choices:
            own = ", or name your own as module:name" if self.importable else ""
            return f"choose one of {', '.join(self.choices)}{own}"
        if self.within:
            least, most = map(number, self.within)
            return f"must be at least {least} and at most {most} ({self.help})"
        return f"must be text of at most {_MAX_CHARACTERS} characters, in UTF-8 and without NUL"


def _is_text(value: str) -> bool:
    """Return whether files and command lines can hold `value`."""
    is_unicode = not any("\ud800" <= character <= "\udfff" for character in value)
    return len(value) <= _MAX_CHARACTERS and is_unicode and "\0" not in value


def as_text(value: Any) -> Any:
    """Escape each `${` in settings that are resolved: OmegaConf would resolve them once more."""
    if isinstance(value, dict):
        return {key: as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_text(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def number(value: float) -> str:
    """Write a bound: an integer with all its digits, another number as short as possible."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    importable: bool = False,
    within: tuple[float, float] | None = None,
) -> Any:
    """Declare a dataclass field; its default is `MISSING` for a required key.

    Args:
        choices: the allowed strings. Empty: any value of the field's type.
        importable: allow `module:name` besides the choices.
        within: the least and the largest value.
    """
    about = Setting(help=help, choices=choices, importable=importable, within=within)
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata={_KEY: about})
    return field(default=default, metadata={_KEY: about})


def settings_of(section: Any) -> dict[str, Setting]:
    """Return the settings of a section (a config dataclass or an instance) by field name."""
    return {item.name: item.metadata[_KEY] for item in fields(section) if _KEY in item.metadata}


def sections(schema: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield `schema` and, depth first, its sections, each after the prefix of its keys."""
    yield prefix, schema
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind):
            yield from sections(cast(type, kind), f"{prefix}{name}.")


@cache
def keys_of(schema: type) -> dict[str, Any]:
    """Return the type of every dotted key of a config dataclass and its sections."""
    return {
        f"{prefix}{name}": kind
        for prefix, section in sections(schema)
        for name, kind in get_type_hints(section).items()
    }


def _check_containers(config: Any) -> None:
    """Check that lists, dicts and sections are that: OmegaConf lets `${key}` be anything there.

    It lets an item of `list[str]` be a list or a dict, too.
    """
    for key, kind in keys_of(type(config)).items():
        options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        kinds = tuple(get_origin(option) or option for option in options)
        value = operator.attrgetter(key)(config)
        containers = any(one in (list, dict) or is_dataclass(one) for one in kinds)
        if containers and not isinstance(value, kinds):
            raise ValueError(f"{key}={value}: write its items, not a reference to a value")
        simple = get_origin(kind) is list and get_args(kind) != (Any,)
        if simple and any(isinstance(item, list | dict) for item in value):
            raise ValueError(f"{key}={value}: a list of single values has no inner brackets")


def check_fields(config: Any) -> None:
    """Check each value of `config` and of its sections. Raises ValueError that names the key."""
    _check_containers(config)
    for prefix, section in sections(type(config)):
        for name, about in settings_of(section).items():
            value = operator.attrgetter(f"{prefix}{name}")(config)
            if value is not None and not about.accepts(value):
                # As much of the value as one line shows, without what a terminal cannot print.
                shown = str(value)[:100].encode(errors="replace").decode().replace("\0", "?")
                raise ValueError(f"{prefix}{name}={shown}: {about.remedy}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question that names the most similar of the `known` words, or an empty string."""
    near = difflib.get_close_matches(word, list(known), 1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""
