"""The configuration file of a run, <run_dir>/config.yaml.

The file is complete at any time, and private: it may hold a key.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_lite.config.commands import TrainConfig
from areal_lite.config.fields import as_text
from areal_lite.system.files import read_regular, write_atomically

CONFIG_FILE = "config.yaml"
_MOST_BYTES, _DEEPEST = 1 << 20, 32
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HIDDEN = "(hidden)"
_COLUMNS = ("prompt_key", "answer_key")  # settings that name columns of data
_SECRET = re.compile(
    r"(?:key|token|passw(?:or)?d|passphrase|secret|credential|bearer|cookie|header"
    r"|auth(?:orization|entication)?)(?P<rest>s?(?:[^a-z].*)?)$"
)
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]*@")


def save_config(config: Any, run_dir: Path) -> Path:
    """Write the resolved configuration atomically as <run_dir>/config.yaml and return the path.

    A file that it replaces is kept as config-1.yaml, config-2.yaml, and so on.
    """
    path = Path(run_dir) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        number = 1 + len(list(path.parent.glob("config-*.yaml")))
        while (kept := path.with_name(f"config-{number}.yaml")).exists():
            number += 1
        write_atomically(kept, path.read_bytes(), private=True)
    text = yaml.safe_dump(asdict(config), allow_unicode=True, sort_keys=False)
    write_atomically(path, text, private=True)
    return path


def load_config(run_dir: Path, schema: type = TrainConfig) -> Any:
    """Read what `save_config` wrote as a `schema`, less unknown settings. Raises ValueError."""
    known = as_text(_known(stored_settings(run_dir), schema))
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), known))
    except OmegaConfBaseException as error:
        raise ValueError(f"{Path(run_dir) / CONFIG_FILE}: {error}") from error


def _known(stored: dict[str, Any], section: type) -> dict[str, Any]:
    """Return the settings in `stored` that a section has."""
    kinds = get_type_hints(section)
    return {
        key: _known(value, kinds[key])
        if is_dataclass(kinds[key]) and isinstance(value, dict)
        else value
        for key, value in stored.items()
        if key in kinds
    }


def changed_settings(config: Any, run_dir: Path) -> dict[str, tuple[Any, Any]]:
    """Return by key the values, in `config` and in <run_dir>/config.yaml, that differ.

    Settings of a single start are left out. Raises ValueError as `stored_settings` does.
    """
    now, before = map(flat, (asdict(config), stored_settings(run_dir)))
    keys = sorted((now.keys() | before.keys()) - {"resume", "run_dir", "server.api_key"})
    return {k: (now.get(k), before.get(k)) for k in keys if now.get(k) != before.get(k)}


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return settings by their full names."""
    if not isinstance(settings, Mapping) or not settings:
        return {prefix.removesuffix("."): settings}
    return {k: v for key, one in settings.items() for k, v in flat(one, f"{prefix}{key}.").items()}


def stored_settings(run_dir: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    """Read <run_dir>/config.yaml, of any command and unchecked; `${…}` is text there.

    Raises ValueError of one line, also for what no run writes: an alias, which could stand for more
    than memory holds, and deep nesting, at which PyYAML's parser in C crashes.
    """
    path = Path(run_dir) / name
    depth = 0
    try:
        raw = read_regular(path, _MOST_BYTES)
        for event in yaml.parse(raw, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
                raise ValueError(f"line {event.start_mark.line + 1} has an alias or is too deep")
        stored = yaml.load(raw, _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} cannot be read: {reason}; mend it, or choose another run_dir"
        ) from error
    if not isinstance(stored, dict) or not stored:
        raise ValueError(f"{path} has no settings: mend it, or choose another run_dir")
    return stored


def without_secrets(value: Any, name: str = "") -> Any:
    """Return settings to show around, without what names or URLs say is secret."""
    found = _SECRET.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    if found and name not in _COLUMNS and not isinstance(value, bool | None):
        # A number is most often a count of tokens, or the id of one.
        if not (isinstance(value, int | float) and found["rest"]):
            return _HIDDEN
    if isinstance(value, dict):
        return {str(key): without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(inner) for inner in value]
    return _USER_INFO.sub(f"{_HIDDEN}@", value) if isinstance(value, str) else value


def value_of(stored: Any, key: str) -> Any:
    """Return a setting by its full name; None where the settings, of any command, lack it."""
    for part in key.split("."):
        stored = stored.get(part) if isinstance(stored, dict) else None
    return stored
