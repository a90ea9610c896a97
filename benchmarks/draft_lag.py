"""Measure how long drafts stay right while the policy changes: tokens a step by lag of version.

    python -m benchmarks.draft_lag RUN

RUN has few prompts, so that each comes again with every version, such as eight prompts with
trainer.batch_groups=8 (examples/chat_model). Its store has what the policy sampled. Each answer of
the second half, which begins with version v, is replayed: drafts come from the answers to its
prompt that begin with version v - lag, and from nothing else. A step gives the drafted tokens up to
the first that the answer contradicts, and one more. `all` has every answer before v, as servers do.

Writes results/draft_lag.json and results/draft_lag.png.
"""

import json
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from areal_lite.cpu.drafts import LONGEST, History, PromptHistory
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.reader import RunReader

RESULTS = Path(__file__).with_name("results") / "draft_lag.json"
ROWS, FLOOR = 8, 0.1  # of a step, and the least chance of a drafted token
Answers = dict[tuple[str, int], list[tuple[list[int], list[int]]]]  # by prompt and version


def answers_of(run: Path) -> Answers:
    """Return the tokens of each answer, and the places of those that were sampled."""
    found: Answers = defaultdict(list)
    with closing(RunReader(run / STORE_FILE)) as store:
        for row in store.trajectories(state="used"):
            places = np.flatnonzero(row["versions"] >= 0).tolist()
            found[row["prompt_id"], row["min_version"]].append((row["tokens"].tolist(), places))
    return found


def steps_of(history: PromptHistory, tokens: list[int], places: list[int]) -> int:
    """Return the decode steps of an answer whose first token the prefill gives."""
    at, end, steps = places[0] + 1, places[-1] + 1, 0
    while at < end:
        before, most = tokens[max(at - LONGEST, 0) : at], min(ROWS, end - at) - 1
        rows = history.draft(before, most, frozenset())
        draft = [row.token for row in rows if row.chance >= FLOOR]
        right = 0
        while right < len(draft) and draft[right] == tokens[at + right]:
            right += 1
        at, steps = at + right + 1, steps + 1
    return steps


def tokens_per_step(answers: Answers, prompt: str, version: int, known: list[int]) -> np.ndarray:
    """Return the tokens after the first and the steps of all answers with a version."""
    histories = History()
    for earlier in known:
        for told in answers[prompt, earlier]:
            histories.learn(*told)
    sums = np.zeros(2)
    for tokens, places in answers[prompt, version]:
        history = histories.of(hash(tuple(tokens[: places[0]])))
        sums += len(places) - 1, steps_of(history, tokens, places)
    return sums


def main() -> None:
    answers = answers_of(Path(sys.argv[1]))
    versions = sorted({version for _, version in answers})
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    late: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for prompt, version in list(answers):
        if version < versions[-1] // 2:
            continue  # all lags are measured on the same answers
        for lag in range(1, version + 1):
            if (prompt, version - lag) in answers:
                late[lag] += tokens_per_step(answers, prompt, version, [version - lag])
        earlier = [known for known in versions if known < version]
        sums["all"] += tokens_per_step(answers, prompt, version, earlier)
        sums["none"] += tokens_per_step(answers, prompt, version, [])
    lags = [lag for lag in sorted(late) if lag <= versions[-1] // 2 and late[lag][1] > 0]
    by_lag = {lag: round(float(late[lag][0] / late[lag][1]), 2) for lag in lags}
    others = {name: round(float(sums[name][0] / sums[name][1]), 2) for name in sums}
    RESULTS.write_text(json.dumps({"by_lag": by_lag, **others}, indent=1) + "\n")
    _draw(by_lag, others)
    print(RESULTS.read_text())


def _draw(by_lag: dict[int, float], others: dict[str, float]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(list(by_lag), list(by_lag.values()), "o-", label="answers of one version")
    axes.axhline(others["all"], ls="--", color="C2", label="all earlier answers")
    axes.axhline(others["none"], ls=":", color="C3", label="the prompt alone")
    axes.set(
        xlabel="version lag of the drafts (steps)", ylabel="tokens a decode step", ylim=(0, None)
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(RESULTS.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
