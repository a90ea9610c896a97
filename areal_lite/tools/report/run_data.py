"""The records in a run directory, read back. The run may be complete, still going or killed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_lite.config import stored_settings, value_of, without_secrets
from areal_lite.run_dir.metrics import read_events, read_metrics
from areal_lite.run_dir.paths import CONFIG_FILE, STORE_FILE, SUMMARY_FILE
from areal_lite.tools.commands import existing_run
from areal_lite.tools.store_columns import Columns, open_columns, to_columns

Metrics = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl or evals.jsonl, in the order in which they were written."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The records of one run. `config` is empty without a config.yaml."""

    run_dir: Path
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    config: dict[str, Any]
    columns: Columns
    trained: Columns  # with a replay buffer, a trajectory for each draw of it; else `columns`
    ended: bool

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def staleness_bound(self) -> int | None:
        """Return the largest staleness of a trained token; None for a run with replay."""
        replays = value_of(self.config, "buffer.replay.capacity")
        return None if replays else value_of(self.config, "buffer.max_staleness")

    @property
    def steps_planned(self) -> int | None:
        return value_of(self.config, "trainer.steps")


def read_run(run_dir: Path) -> RunData:
    """Read all records that exist. Raises ValueError for a directory that has none."""
    existing_run(run_dir)
    config, store = read_run_config(run_dir), run_dir / STORE_FILE
    columns = read_columns(store)
    replays = value_of(config, "buffer.replay.capacity")
    return RunData(
        run_dir=run_dir,
        metrics=read_metrics(run_dir),
        evals=read_events(run_dir, "evals"),
        config=config,
        columns=columns,
        trained=read_columns(store, drawn=True) if replays else columns,
        ended=(run_dir / SUMMARY_FILE).exists(),
    )


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Return the configuration of a run without secrets; {} without a config.yaml.

    Raises ValueError for a damaged one.
    """
    return without_secrets(stored_settings(run_dir)) if (run_dir / CONFIG_FILE).exists() else {}


def read_columns(path: Path, drawn: bool = False) -> Columns:
    """Read the columns of the store at `path`, in one pass over each table.

    Without a store there are no trajectories: a run with debug=train_only has none. Raises
    ValueError for a store that cannot be read. `drawn` is as in `ColumnReader.columns`.
    """
    with open_columns(path) as store:
        return store.columns(drawn) if store else to_columns()


def source_names(metrics: Metrics) -> list[str]:
    """Return the names of the data sources; none if a run has a single one."""
    prefix = "reward_mean/"
    keys = dict.fromkeys(key for row in metrics for key in row if key.startswith(prefix))
    return [key.removeprefix(prefix) for key in keys]
