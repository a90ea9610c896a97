"""Settings: the default, the allowed values and the help of a key, in its dataclass field.

    @dataclass
    class TrainerConfig:
        lr: float = setting(1e-4, "Learning rate.", above=0)

`check_fields`, `areal-lite COMMAND --help` and docs/configuration.md all read this metadata.
`null` (None) is allowed where the field's type says so. Rules over several fields are in rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, cast, get_type_hints

_KEY = "setting"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one key means and which values it takes."""

    help: str
    choices: tuple[str, ...] = ()
    importable: bool = False
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    def accepts(self, value: Any) -> bool:
        """Tell whether `value` is one of the choices and within the bounds."""
        return (
            (not self.choices or value in self.choices or (self.importable and ":" in value))
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    @property
    def remedy(self) -> str:
        """Say what to do about a value that is not accepted."""
        if self.choices:
            own = ", or name your own as module:name" if self.importable else ""
            return f"choose one of {', '.join(self.choices)}{own}"
        bounds = {
            "at least": self.minimum,
            "more than": self.above,
            "at most": self.maximum,
            "less than": self.below,
        }
        return "must be " + " and ".join(
            f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None
        )


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    importable: bool = False,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a dataclass field. A list or dict default is copied for each instance.

    Args:
        default: The value when the user gives none; `MISSING` for a required key.
        help: What the setting is, with its unit, in sentences.
        choices: The allowed strings. Empty: any value of the field's type.
        importable: Allow `module:name` besides the choices.
        minimum, above, maximum, below: Bounds; `above` and `below` exclude the bound itself.
    """
    about = Setting(
        help=help,
        choices=choices,
        importable=importable,
        minimum=minimum,
        above=above,
        maximum=maximum,
        below=below,
    )
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata={_KEY: about})
    return field(default=default, metadata={_KEY: about})


def settings_of(section: Any) -> dict[str, Setting]:
    """Return the settings of a section (a config dataclass or an instance) by field name."""
    return {item.name: item.metadata[_KEY] for item in fields(section) if _KEY in item.metadata}


def keys_of(schema: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of every dotted key of a config dataclass, those of sections included."""
    found = {}
    for name, kind in get_type_hints(schema).items():
        found[f"{prefix}{name}"] = kind
        if is_dataclass(kind):
            found |= keys_of(cast(type, kind), f"{prefix}{name}.")
    return found


def check_fields(config: Any, prefix: str = "") -> None:
    """Check each value of `config` and of its sections against its choices and bounds.

    Raises ValueError that names the dotted key, its value and the remedy.
    """
    for name, about in settings_of(config).items():
        value = getattr(config, name)
        if value is not None and not about.accepts(value):
            raise ValueError(f"{prefix}{name}={value}: {about.remedy}")
    for item in fields(config):
        if is_dataclass(section := getattr(config, item.name)):
            check_fields(section, f"{prefix}{item.name}.")
