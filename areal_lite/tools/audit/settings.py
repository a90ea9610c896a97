"""The settings that the audit needs, of each start of a run.

The files are read without their schema, which takes much longer, and a run may have many starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areal_lite.config.files import CONFIG_FILE

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one start, by their names in the configuration."""

    batch_groups: int
    max_staleness: int
    overdue: str
    window: int | None
    replay_capacity: int
    retire_above: float | None
    rest_unsolved: int
    sync_every: int
    eval_problems: int
    eval_every: int
    data_seed: int
    data_shuffle: bool
    data_sources: dict[str, dict[str, Any]]


_KEYS = {
    "batch_groups": "trainer.batch_groups",
    "max_staleness": "buffer.max_staleness",
    "overdue": "buffer.overdue",
    "window": "buffer.window",
    "replay_capacity": "buffer.replay.capacity",
    "retire_above": "rollout.retire_above",
    "rest_unsolved": "rollout.rest_unsolved",
    "sync_every": "sync.every",
    "eval_problems": "eval.problems",
    "eval_every": "eval.every",
    "data_seed": "data.seed",
    "data_shuffle": "data.shuffle",
    "data_sources": "data.sources",
}


def settings_of_starts(run_dir: Path) -> list[Settings]:
    """Read the settings of each start of a run, the newest last.

    Raises ValueError for a directory that is not that of a training run.
    """
    if not (run_dir / CONFIG_FILE).exists():
        raise ValueError(f"run_dir={run_dir} is not the directory of a training run: give one")
    earlier = len(list(run_dir.glob("config-*.yaml")))
    names = [*(f"config-{number}.yaml" for number in range(1, earlier + 1)), CONFIG_FILE]
    return [_read(run_dir / name) for name in names]


def _read(path: Path) -> Settings:
    try:
        stored = yaml.load(path.read_bytes(), _Loader)
        return Settings(**{name: _select(stored, key) for name, key in _KEYS.items()})
    except (OSError, yaml.YAMLError, UnicodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read: {reason}; mend it") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} lacks {error}: it is not that of a training run") from error


def _select(stored: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(stored, dict) or part not in stored:
            raise KeyError(key)
        stored = stored[part]
    return stored
