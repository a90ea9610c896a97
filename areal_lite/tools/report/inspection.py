"""Trajectories in the terminal: chosen by filters, with the tokens of each weight version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from areal_lite.config.report import InspectConfig
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.store_rows import decoded
from areal_lite.run_dir.store_schema import NOT_KEPT, TOKENS, TRACE, WITH_TOKENS
from areal_lite.tools.report.columns import open_store
from areal_lite.tools.report.pieces import token_decoder, token_texts
from areal_lite.tools.report.run_data import read_run_config
from areal_lite.tools.report.text import short, visible
from areal_lite.trajectory import trace_name

_COLORS = ("blue", "dark_orange", "green", "magenta", "cyan", "yellow", "purple", "bright_black")


def matching(run_dir: Path, filters: InspectConfig) -> tuple[int, Iterator[dict[str, Any]]]:
    """Return how many trajectories all filters let through, and the first `limit` of them.

    Raises ValueError without a store.
    """
    conditions = {
        "group_id = :group": filters.group,
        "step = :step - 1": filters.step,
        "EXISTS (SELECT 1 FROM json_each(segments) WHERE json_extract(value, '$[0]') = :version)": (
            filters.version
        ),
        "reward >= :reward_min": filters.reward_min,
        "reward <= :reward_max": filters.reward_max,
    }
    where = " AND ".join(["1", *(text for text, value in conditions.items() if value is not None)])
    source = f"FROM trajectories {TOKENS} JOIN groups USING (group_id) WHERE {where}"
    values = vars(filters)

    def rows() -> Iterator[dict[str, Any]]:
        with open_store(run_dir / STORE_FILE) as db:
            cursor = db.execute(
                f"SELECT {WITH_TOKENS}, state, step, prompt_id {source} "
                f"ORDER BY {TRACE} LIMIT :limit",
                values,
            )
            names = [column[0] for column in cursor.description]
            for row in cursor:
                yield decoded(dict(zip(names, row)))

    with open_store(run_dir / STORE_FILE) as db:
        (count,) = db.execute(f"SELECT count(*) {source}", values).fetchone()
    return count, rows()


def show_matching(run_dir: Path, filters: InspectConfig) -> Iterator[RenderableType]:
    """Yield what to print: the number of matches, then each trajectory up to the limit."""
    count, rows = matching(run_dir, filters)
    decode = token_decoder(run_dir, read_run_config(run_dir).get("model"))
    shown = min(count, filters.limit)
    found = "1 trajectory matches" if count == 1 else f"{count} trajectories match"
    more = f"; the first {shown} follow (limit={filters.limit})" if shown < count else ""
    yield Text(f"{found}{more}", style="bold")
    for row in rows:
        kept = row["tokens"] is not None
        yield trajectory_text(row, token_texts(row["tokens"].tolist(), decode) if kept else None)


def trajectory_text(row: dict[str, Any], texts: list[str] | None) -> RenderableType:
    """Return a trajectory for the terminal: a line of facts, then its prompt and segments.

    Args:
        row: a `decoded` row of the store, with the state, step and prompt_id of its group.
        texts: the text of each token; None if they are not kept.
    """
    step = f"step {row['step'] + 1}" if row["step"] is not None else row["state"]
    server = f" on {row['server']}" if row["server"] else ""
    facts = (
        f" · {step} · reward {short(row['reward'])} · {row['n_prompt']} + "
        f"{row['n_tokens'] - row['n_prompt']} tokens · ended by {row['finish_reason']} after "
        f"{row['finished_at'] - row['started_at']:.2f} s{server} · prompt {row['prompt_id']}"
    )
    name = trace_name(row["sample_index"], row["trace_index"])
    title = Text(f"\ngroup {row['group_id']}, sample {name}", style="bold")
    title.append(visible(facts), style="not bold")
    if texts is None:
        found = [_label(*segment) for segment in row["segments"]]
        return Group(title, Text(f"[{NOT_KEPT}; {'; '.join(found)}]", style="italic"))
    parts: list[RenderableType] = [title]
    end = 0
    for version, start, stop in row["segments"]:
        if start > end:
            parts += _part("prompt" if not end else "environment", texts[end:start], "dim")
        mean = float(np.mean(row["logprobs"][start:stop]))
        label = f"{_label(version, start, stop)}, mean log-prob {mean:.2g}"
        parts += _part(label, texts[start:stop], _COLORS[version % len(_COLORS)])
        end = stop
    if end < len(texts):
        parts += _part("environment" if end else "prompt", texts[end:], "dim")
    return Group(*parts)


def _label(version: int, start: int, stop: int) -> str:
    return f"version {version}, " + ("1 token" if stop - start == 1 else f"{stop - start} tokens")


def _part(label: str, texts: list[str], style: str) -> list[RenderableType]:
    return [Text(f"[{label}]", style="italic"), Text(visible("".join(texts)), style=style)]
