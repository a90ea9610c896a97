"""Settings: the default, the allowed values and the help of a key, in its dataclass field.

    @dataclass
    class TrainerConfig:
        lr: float = setting(1e-4, "Learning rate.", above=0)

`check_fields`, `areal-lite COMMAND --help` and docs/configuration.md all read this metadata.
`null` (None) is allowed where the field's type says so. Rules over several fields are in rules.py.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, cast, get_type_hints

_KEY = "setting"


class Bound(NamedTuple):
    """A limit of a value: the comparison, and its wording in the reference and in errors."""

    holds: Callable[[Any, float], bool]
    sign: str
    words: str


_BOUNDS = {
    "minimum": Bound(operator.ge, ">=", "at least"),
    "above": Bound(operator.gt, ">", "more than"),
    "maximum": Bound(operator.le, "<=", "at most"),
    "below": Bound(operator.lt, "<", "less than"),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The help of one key and the values that it accepts."""

    help: str
    choices: tuple[str, ...]
    importable: bool
    limits: list[tuple[Bound, float]]

    def accepts(self, value: Any) -> bool:
        """Tell whether `value` is one of the choices and within the bounds."""
        chosen = not self.choices or value in self.choices or (self.importable and ":" in value)
        return chosen and all(bound.holds(value, limit) for bound, limit in self.limits)

    @property
    def remedy(self) -> str:
        """Say what to do about a value that is not accepted."""
        if self.choices:
            own = ", or name your own as module:name" if self.importable else ""
            return f"choose one of {', '.join(self.choices)}{own}"
        return "must be " + " and ".join(f"{bound.words} {x:g}" for bound, x in self.limits)


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    importable: bool = False,
    **bounds: float,
) -> Any:
    """Declare a dataclass field. A list or dict default is copied for each instance.

    Args:
        default: The value when the user gives none; `MISSING` for a required key.
        help: What the setting is, with its unit, in sentences.
        choices: The allowed strings. Empty: any value of the field's type.
        importable: Allow `module:name` besides the choices.
        bounds: minimum, above, maximum, below; `above` and `below` exclude the bound itself.
    """
    limits = [(_BOUNDS[name], limit) for name, limit in bounds.items()]
    about = Setting(help=help, choices=choices, importable=importable, limits=limits)
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


def keys_of(schema: type) -> dict[str, Any]:
    """Return the type of every dotted key of a config dataclass, those of sections included."""
    return {
        f"{prefix}{name}": kind
        for prefix, section in sections(schema)
        for name, kind in get_type_hints(section).items()
    }


def check_fields(config: Any, prefix: str = "") -> None:
    """Check each value of `config` and of its sections against its choices and bounds.

    Raises ValueError that names the dotted key, its value and the remedy.
    """
    for inner, section in sections(type(config)):
        for name, about in settings_of(section).items():
            value = operator.attrgetter(f"{inner}{name}")(config)
            if value is not None and not about.accepts(value):
                raise ValueError(f"{prefix}{inner}{name}={value}: {about.remedy}")
