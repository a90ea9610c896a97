"""Findings about groups with equal rewards. Nearly all of them come first, and explain others."""

from contextlib import closing
from typing import NamedTuple

import numpy as np

from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.reader import RunReader
from areal_lite.tools.diagnose.history import History, Severity, Sign, finding, hint, limit
from areal_lite.tools.formatting import excerpt, short

_ANSWERS = 3
_SHOWN = 120  # characters of an answer, and of the end of its prompt

EMPTY = "nearly every answer is empty"
CUT = "nearly every answer is cut off"
CONSTANT = "nearly every answer has the same reward, and it is not 0"
ZERO = "nearly no answer is rewarded"
UNIFORM = "all answers to a prompt have the same reward"
_WORDS = {  # the cause, and what to change
    EMPTY: (
        "the chat template is missing or another model's, or the wrong tokens end an answer",
        "look at the prompt as the model reads it (`train --dry-run`): set `data.chat`, or "
        "eos_token_id in generation_config.json",
    ),
    CUT: (
        "answers are longer than allowed, or the model does not end them",
        "raise `rollout.max_new_tokens`; look at what ends an answer (`train --dry-run`)",
    ),
    CONSTANT: (
        "the prompts are solved, or the reward function does not tell answers apart",
        "use harder prompts, or mend `reward.function`",
    ),
    ZERO: (
        "the policy cannot solve these prompts, or no answer can satisfy the reward function",
        "read the answers: if some are right, mend `reward.function` or the data; otherwise use "
        "easier prompts that say how to answer, or a better model",
    ),
    UNIFORM: (
        "some prompts are solved and others too hard, or answers to a prompt are alike",
        "use prompts that are solved now and then, or raise `rollout.temperature`",
    ),
}


class _Newest(NamedTuple):
    """The newest groups of the store, filtered ones included: the rewards of n of them."""

    low: np.ndarray  # float64 [n]
    high: np.ndarray  # float64 [n]
    cut: float  # share of answers that were cut off
    empty: float  # share of answers without a token before the last one

    @property
    def equal(self) -> np.ndarray:
        """Return the rewards of the groups whose rewards are all equal."""
        return self.low[self.low == self.high]


def _newest(run: History) -> _Newest | None:
    columns, known = run.columns, np.isfinite(run.columns.reward)
    most = int(limit("recent_steps")) * run.config.trainer.batch_groups
    ids = np.unique(columns.group[known])[-most:]
    if not len(ids):
        return None
    chosen = known & np.isin(columns.group, ids)
    first = np.unique(columns.group[chosen], return_index=True)[1]
    low, high = (end.reduceat(columns.reward[chosen], first) for end in (np.minimum, np.maximum))
    cut, empty = columns.truncated[chosen].mean(), np.mean(columns.sampled[chosen] <= 1)
    return _Newest(low, high, float(cut), float(empty))


def _compares_groups(run: History) -> bool:
    """Return whether an advantage is the difference from the other rewards of its group."""
    own = run.config.algo.advantage
    return own.estimator == "rloo" or (own.estimator == "grpo" and own.mean == "group")


@finding(
    "No signal",
    flag="equal rewards in {uniform_alarm:.0%} of the newest groups, at least {signal_groups:g}; "
    "hint: no right answer of as many in the first evaluation",
    cause="the prompts are too hard or solved, answers are empty or cut off, or the reward "
    "function does not tell answers apart",
    change="`diagnose` shows answers, and says what to change for each kind",
    unless=("reward_collapse",),
)
def no_signal(run: History) -> Sign | None:
    groups, algo = _newest(run), run.config.algo
    if algo.advantage.estimator == "off" or (algo.kl.coef and algo.kl.into == "advantage"):
        return None  # a reference policy gives a signal of its own
    if groups is None or len(groups.low) < limit("signal_groups"):
        return _first_evaluation(run)
    alike = bool(groups.low.min() == groups.high.max())
    share = len(groups.equal) / len(groups.low) if _compares_groups(run) else float(alike)
    if share < limit("uniform_alarm"):
        return None
    text = (
        f"{share:.0%} of the newest {len(groups.low)} groups have equal rewards, "
        f"{short(float(groups.equal.mean()))} on average; {groups.cut:.0%} of the answers are cut "
        f"off, {groups.empty:.0%} empty"
    )
    return _sign(run, Severity.ALARM, _kind(groups), text)


@finding(
    "Most groups are too easy or too hard",
    flag="uniform_groups_share above {uniform_share:.0%}",
    cause="the policy has solved these prompts, or cannot solve them yet",
    change="set `rollout.filters=[zero_variance]`; where prompts repeat, "
    "`rollout.retire_above=0.9` or `rollout.rest_unsolved=8`; against hard ones, raise "
    "`rollout.group_size` or `rollout.max_new_tokens`, and read trajectories (`areal-lite report "
    "--inspect`)",
    unless=("no_signal", "truncated", "reward_collapse"),
)
def few_signals(run: History) -> Sign | None:
    uniform, means = run.recent("uniform_groups_share"), run.recent("reward_mean")
    if not len(uniform) or not _compares_groups(run) or uniform.mean() <= limit("uniform_share"):
        return None
    known = run.columns.reward[np.isfinite(run.columns.reward)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 1.0)
    rewards = means if (groups := _newest(run)) is None else groups.equal
    # If all rewards of the run are equal, a positive one counts as a success.
    up = int(np.sum(rewards > ((low + high) / 2 if low < high else 0.0)))
    easy = 2 * up >= len(rewards)
    found = hint(
        f"{uniform.mean():.0%} of the recent groups have equal rewards: {up} at the top, "
        f"{len(rewards) - up} at the bottom; mean reward {means.mean():.2f}"
    )
    kind = "easy: all their trajectories succeed" if easy else "hard: all their trajectories fail"
    return found._replace(words={"title": f"Most groups are too {kind}"})


def _first_evaluation(run: History) -> Sign | None:
    """Report an evaluation without a right answer, as long as too little was trained to tell."""
    if not run.evals or run.step >= limit("least_steps"):
        return None
    first = run.evals[0]
    answers = first["problems"] * (1 + first.get("samples", 1))
    best = max(first.get("greedy") or 0.0, first.get("sampled") or 0.0)
    if best > 0 or answers < limit("signal_groups"):
        return None
    text = f"none of {answers} answers is right in the first evaluation"
    return _sign(run, Severity.HINT, ZERO, text)


def _kind(groups: _Newest) -> str:
    nearly_all = limit("uniform_alarm")
    rewards, counts = np.unique(groups.equal, return_counts=True)
    usual = rewards[counts.argmax()]
    if groups.empty >= nearly_all:
        return EMPTY
    if counts.max() < nearly_all * counts.sum():
        return UNIFORM
    if groups.cut >= nearly_all and usual <= 0:
        return CUT
    return CONSTANT if usual else ZERO


def _sign(run: History, severity: Severity, kind: str, text: str) -> Sign:
    """Describe a missing signal, and quote an answer of each of the newest groups."""
    groups = np.unique(run.columns.group[run.columns.kept])[: -_ANSWERS - 1 : -1]
    for group in groups.tolist():
        with closing(RunReader(run.run_dir / STORE_FILE)) as reader:
            rows = list(reader.trajectories(group=group, kept=True, limit=1))
        for row in rows:  # none, if the run has removed its tokens meanwhile
            cut = ", cut off" if row["finish_reason"] == "length" else ""
            reward = "none" if row["reward"] is None else short(row["reward"])
            answer, asked = row["completion"] or "", (row["prompt"] or "")[-_SHOWN:]
            text += f"\n  reward {reward}{cut}: {excerpt(answer, _SHOWN)}"
            text += f"; {row['prompt_id']!r} ends {excerpt(asked, _SHOWN)}"
    cause, change = _WORDS[kind]
    return Sign(severity, text, {"title": f"No signal: {kind}", "cause": cause, "change": change})
