"""Trajectories with their text: chosen groups on the page, filtered ones in the terminal."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from areal_lite.run_dir.metrics import read_events
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.store_format import NOT_KEPT
from areal_lite.system.processes import visible
from areal_lite.tools.commands import ReportConfig
from areal_lite.tools.formatting import short
from areal_lite.tools.report.run_data import Columns, RunData, read_run_config
from areal_lite.trajectory import trace_name

MAX_GROUPS = 45
MAX_TOKENS = 150_000
# Trajectories of a group, and tokens of a trajectory.
_MEMBERS = 8
_LONGEST = 6000
CHOICE = (
    "The groups are chosen from up to 15 steps that are evenly spaced over the run: the group "
    "with the lowest mean reward, the one with the highest, and the one whose importance weights "
    "were recorded. The page has at most "
    f"{MAX_TOKENS:,} tokens, {_MEMBERS} samples of a group and {_LONGEST:,} tokens of a sample. "
    "Sample 3.1 is trace 1 of the episode whose trace 0 is sample 3."
)
_INCOMPLETE = "\ufffd"
# A character has at most four bytes. Longer runs of broken bytes are not one character.
_LONGEST_CHARACTER = 4
_COLORS = ("blue", "dark_orange", "green", "magenta", "cyan", "yellow", "purple", "bright_black")


def group_rewards(columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return id, step and mean reward of each used group with its tokens, in the order of ids.

    Samples without a reward are left out of the mean.
    """
    used = (columns.step >= 0) & ~np.isnan(columns.reward) & columns.kept
    ids, first, inverse = np.unique(columns.group[used], return_index=True, return_inverse=True)
    sums = np.bincount(inverse, columns.reward[used], len(ids))
    return ids, columns.step[used][first], sums / np.bincount(inverse, minlength=len(ids))


def choose_groups(columns: Columns, recorded: Mapping[int, int]) -> list[int]:
    """Choose the groups of a page, in the order of steps; see CHOICE.

    `recorded` is, by step from 0, the group with known importance weights.
    """
    ids, steps, rewards = group_rewards(columns)
    present = np.unique(steps)
    at = np.linspace(0, len(present) - 1, min(MAX_GROUPS // 3, len(present))).astype(int)
    per_step = []
    for step in present[at].tolist():
        here = np.flatnonzero(steps == step)
        wanted = [int(ids[here[pick(rewards[here])]]) for pick in (np.argmin, np.argmax)]
        if recorded.get(step) in ids[here]:
            wanted = [recorded[step], *wanted]
        per_step.append(list(dict.fromkeys(wanted)))
    return _within_budget(columns, per_step)


def _within_budget(columns: Columns, per_step: list[list[int]]) -> list[int]:
    """Keep groups up to MAX_TOKENS: first the first of every step, then the second, …"""
    left, kept = MAX_TOKENS, set()
    for rank in range(max(map(len, per_step), default=0)):
        for groups in (g for g in per_step if len(g) > rank):
            first, last = np.searchsorted(columns.group, [groups[rank], groups[rank] + 1])
            cost = int(np.minimum(columns.tokens[first:last], _LONGEST)[:_MEMBERS].sum())
            if cost <= left:
                left -= cost
                kept.add(groups[rank])
    return [group for groups in per_step for group in groups if group in kept]


def sample_groups(run: RunData) -> Iterator[dict[str, Any]]:
    """Yield the groups of the rollout browser with their tokens; see CHOICE."""
    # Lines of a replay buffer name the groups of its batches, which the store does not know.
    lines = [] if run.trained is not run.columns else read_events(run.run_dir, "proximal")
    # A resumed run repeats steps: the last line of a step is true.
    recorded = {line["step"]: line["group_id"] for line in lines}
    if not (groups := choose_groups(run.columns, recorded)):
        return
    prox = {of["group_id"]: of["prox"] for of in lines if recorded[of["step"]] == of["group_id"]}
    decode = token_decoder(run.run_dir, run.config.get("model"))
    with closing(RunReader(run.run_dir / STORE_FILE)) as reader:
        for group in groups:
            if not (rows := list(reader.trajectories(group=group, kept=True, limit=_MEMBERS))):
                continue  # the run has removed its tokens meanwhile
            bound, step = run.staleness_bound, rows[0]["step"]
            samples = [_sample(row, prox.get(group, {}), decode, bound) for row in rows]
            known = [s["reward"] for s in samples if s["reward"] is not None]
            yield {
                "group": group,
                "prompt": rows[0]["prompt_id"],
                "state": rows[0]["state"],
                "step": None if step is None else step + 1,
                "reward": sum(known) / len(known) if known else None,
                "samples": samples,
            }


def _sample(
    row: Mapping[str, Any],
    prox: Mapping[str, list[float | None]],
    decode: Callable[[Sequence[int]], str],
    max_staleness: int | None,
) -> dict[str, Any]:
    """Return a trajectory for the browser.

    `prox` has, by trace, the proximal log-probs of the sampled tokens. Tokens staler than
    `max_staleness` are masked; None is no bound.
    """
    ids, logprobs, versions = (row[key][:_LONGEST] for key in ("tokens", "logprobs", "versions"))
    name = trace_name(row["sample_index"], row["trace_index"])
    staleness = (row["step"] or 0) - versions
    bound = math.inf if row["step"] is None or max_staleness is None else max_staleness
    return {
        "sample": name,
        "reward": row["reward"],
        "finish": row["finish_reason"],
        "server": row["server"],
        "seconds": round(row["finished_at"] - row["started_at"], 3),
        "segments": row["segments"],
        "cut": row["n_tokens"] > _LONGEST,
        "texts": token_texts(ids.tolist(), decode),
        "logprobs": [_rounded(x) if v >= 0 else None for x, v in zip(logprobs, versions)],
        "weights": _weights(prox.get(name), logprobs, versions),
        "overdue": np.flatnonzero((versions >= 0) & (staleness > bound)).tolist(),
    }


def _weights(
    prox: Sequence[float | None] | None, logprobs: np.ndarray, versions: np.ndarray
) -> list[float | None] | None:
    """Return exp(proximal - behavior) of each token, None where it was not sampled or is unknown.

    The whole is None when the log-probs are not of this trajectory: a resumed run sampled it again.
    """
    sampled = np.flatnonzero(versions >= 0)
    if prox is None or len(prox) < len(sampled):
        return None
    weights: list[float | None] = [None] * len(versions)
    for index, value in zip(sampled.tolist(), prox):
        if value is not None:
            weights[index] = _rounded(math.exp(min(50.0, value - float(logprobs[index]))))
    return weights


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def token_decoder(run_dir: Path, model: str | None) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text, special tokens included.

    The tokenizer comes from the checkpoint folder `model`, or from the folder of that name in
    `run_dir`, which may have been moved. Without one, the text of a token is its number.
    """
    name = Path(model or "model")
    files = [folder / "tokenizer.json" for folder in (name, run_dir / name.name)]
    if (file := next(filter(Path.is_file, files), None)) is None:
        return lambda ids: "".join(f"‹{i}›" for i in ids)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def token_texts(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return a text for each token, which together are the text of all.

    A token that ends within a character has no text; the token that completes it has. A token is
    decoded after its predecessor, because decoders drop a space at the start of a text.
    """
    cached = cache(decode)
    texts = []
    shown = begin = 0  # tokens [begin, shown) are the context, [shown, i] are new
    for i in range(len(ids)):
        text = cached(tuple(ids[begin : i + 1]))
        incomplete = text.endswith(_INCOMPLETE) and i + 1 - shown < _LONGEST_CHARACTER
        if incomplete and i + 1 < len(ids):
            texts.append("")
            continue
        texts.append(text[len(cached(tuple(ids[begin:shown]))) :])
        begin, shown = shown, i + 1
    return texts


def show_matching(run_dir: Path, config: ReportConfig) -> Iterator[RenderableType]:
    """Yield what to print: the number of matches, then each trajectory up to the limit.

    Raises ValueError without a store.
    """
    filters = reader_filters(config)
    decode = token_decoder(run_dir, read_run_config(run_dir).get("model"))
    with closing(RunReader(run_dir / STORE_FILE)) as reader:
        count = reader.count_trajectories(**filters)
        shown = min(count, config.limit)
        found = "1 trajectory matches" if count == 1 else f"{count} trajectories match"
        more = f"; the first {shown} follow (limit={config.limit})" if shown < count else ""
        yield Text(f"{found}{more}", style="bold")
        for row in reader.trajectories(**filters, limit=config.limit):
            yield trajectory_text(row, decode)


def reader_filters(config: ReportConfig) -> dict[str, Any]:
    """Return the filters of RunReader, which counts steps from 0."""
    names = ("group", "step", "version", "reward_min", "reward_max")
    filters = {name: getattr(config, name) for name in names}
    return filters | {"step": None if config.step is None else config.step - 1}


def trajectory_text(row: dict[str, Any], decode: Callable[[Sequence[int]], str]) -> RenderableType:
    """Return a trajectory for the terminal: a line of facts, then its prompt and segments.

    `row` is one of `RunReader.trajectories`.
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
    if row["tokens"] is None:
        found = [_label(*segment) for segment in row["segments"]]
        return Group(title, Text(f"[{NOT_KEPT}; {'; '.join(found)}]", style="italic"))
    texts = token_texts(row["tokens"].tolist(), decode)
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
