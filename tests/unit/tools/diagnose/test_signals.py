"""Runs with nothing to learn from: each kind is named first, with answers from the store."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from areal_lite.config import load_config
from areal_lite.run_dir.store import Store
from areal_lite.tools.diagnose import signals
from areal_lite.tools.diagnose.diagnosis import diagnose, missing_signal
from areal_lite.tools.diagnose.history import Severity, read_history
from areal_lite.tools.diagnose.signals import _newest
from areal_lite.tools.report.panel import Notice
from areal_lite.tools.report.run_watch import CONSOLE, finding_notices
from areal_lite.tools.report.summary import summary_table
from areal_lite.trajectory import Group, GroupState
from tests.unit.tools.diagnose.test_findings import END, STEPS, findings, make_run, the_only
from tests.unit.tools.report.synthetic_run import T0, trajectory

# What follows when nothing is rewarded: no gradient but for one batch, and a trainer that idles.
FOLLOWS = {
    "grad_norm": lambda step: 3.0 if step == 12 else 0.0,
    "clip_fraction": 0.0,
    "truncated_share": 0.7,
    "distinct_share": 0.15,
    "entropy": lambda step: 0.5 * 0.8**step,
    "wait_s": 0.01,
    "queue_depth": 90,
    "in_flight": 2,
}
SMALL = "trainer.batch_groups=4"


def add_groups(
    run_dir: Path,
    rewards: list[list[float]],
    tokens: int = 5,
    cut: bool = False,
    prompt: str = "question",
) -> None:
    """Finish a group for each list of rewards; the answer of sample 0 to prompt i is "its i"."""
    store = Store(run_dir / "trajectories.sqlite")
    for i, own in enumerate(rewards):
        members = [
            replace(
                trajectory(i, k, [(0, tokens)], T0, T0 + i, reward=float(reward)),
                finish_reason="length" if cut else "stop",
            )
            for k, reward in enumerate(own)
        ]
        store.admit(i, f"data.jsonl:{i}", i, i + 1, len(own), T0)
        texts = [(f"{prompt} {i}", f"its {i}" if k == 0 else "another") for k in range(len(own))]
        group = Group(group_id=i, prompt_id=f"data.jsonl:{i}", size=len(own), trajectories=members)
        store.finish(group, texts, None, T0 + i)
    store.close()


def the_kind(run_dir: Path, severity: Severity = Severity.ALARM) -> str:
    """Return the kind of a missing signal, which must be the only finding."""
    the_only(run_dir, "no_signal", severity)
    return findings(run_dir)["no_signal"].title.removeprefix("No signal: ")


@pytest.mark.parametrize(
    ("kind", "rewards", "settings", "remedy"),
    [
        (signals.ZERO, [[0, 0]] * 40, {}, "read the answers"),
        (signals.EMPTY, [[0, 0]] * 40, {"tokens": 1}, "eos_token_id"),
        (signals.CUT, [[0, 0]] * 40, {"cut": True}, "raise `rollout.max_new_tokens`"),
        (signals.CONSTANT, [[1, 1]] * 40, {}, "harder prompts"),
        (signals.CONSTANT, [[1, 1]] * 40, {"cut": True}, "harder prompts"),
        (signals.UNIFORM, [[0, 0], [1, 1]] * 20, {}, "now and then"),
    ],
)
def test_a_missing_signal_is_the_only_finding(tmp_path: Path, kind, rewards, settings, remedy):
    run_dir = make_run(tmp_path / "run", SMALL, **FOLLOWS)
    add_groups(run_dir, rewards, **settings)
    assert the_kind(run_dir) == kind
    found = findings(run_dir)["no_signal"]
    assert "100% of the newest 40 groups have equal rewards" in found.evidence
    assert remedy in found.change


def test_what_follows_is_found_where_there_is_a_signal(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", SMALL, **FOLLOWS)
    add_groups(run_dir, [[0, 1]] * 40)
    expected = {"truncated", "entropy_collapse", "slow_trainer"}
    assert findings(run_dir).keys() == expected
    # A norm is no spike only because most batches have none.
    assert "gradient_spikes" not in findings(run_dir)


def test_the_newest_answers_are_quoted_with_their_rewards(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", SMALL)
    add_groups(run_dir, [[-1, -1]] * 40, cut=True)
    lines = the_only(run_dir, "no_signal", Severity.ALARM).splitlines()
    assert lines[1:] == [
        f"  reward -1, cut off: 'its {i}'; 'data.jsonl:{i}' ends 'question {i}'"
        for i in (39, 38, 37)
    ]
    assert missing_signal(run_dir) == "\n".join(
        [f"No signal: nearly every answer is cut off: {lines[0]}", *lines[1:]]
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_newest_groups_are_counted_as_by_hand(tmp_path: Path, seed: int) -> None:
    run_dir = make_run(tmp_path / "run", "trainer.batch_groups=2")
    draw = random.Random(seed)
    rewards = [[draw.choice([0, 0, 0, 1]) for _ in range(2)] for _ in range(50)]
    add_groups(run_dir, rewards)
    equal = [own[0] for own in rewards[-20:] if own[0] == own[1]]  # of ten steps of two groups
    found = _newest(read_history(run_dir, END))
    assert len(found.low) == 20 and found.equal.tolist() == equal


def test_groups_need_to_be_many_and_mostly_without_a_signal(tmp_path: Path) -> None:
    few = make_run(tmp_path / "few", SMALL)
    add_groups(few, [[0, 0]] * 29)
    assert not findings(few)
    enough = make_run(tmp_path / "enough", SMALL)
    add_groups(enough, [[0, 1]] * 3 + [[0, 0]] * 27)
    assert the_kind(enough) == signals.ZERO
    some = make_run(tmp_path / "some", SMALL)
    add_groups(some, [[0, 1]] * 4 + [[0, 0]] * 26)
    assert not findings(some)


def test_filtered_groups_count(tmp_path: Path) -> None:
    """A filter leaves nothing for the first step, so that metrics say nothing."""
    run_dir = make_run(tmp_path / "run", SMALL, steps=0, planned=0)
    store = Store(run_dir / "trajectories.sqlite")
    for i in range(40):
        group = Group(
            group_id=i,
            prompt_id=f"p{i}",
            size=1,
            trajectories=[trajectory(i, 0, [(0, 5)], T0, T0 + 1, reward=0.0)],
        )
        store.admit(i, f"p{i}", i, i + 1, 1, T0)
        store.finish(group, [("a", "b")], "zero_variance", T0 + 1, GroupState.FILTERED)
    store.close()
    assert the_kind(run_dir) == signals.ZERO


def test_a_signal_depends_on_what_the_objective_compares(tmp_path: Path) -> None:
    critic = "algo.advantage.estimator=gae"
    run_dir = make_run(tmp_path / "a", SMALL, critic)
    add_groups(run_dir, [[0, 0], [1, 1]] * 20)  # prompts are compared with each other
    assert not findings(run_dir)
    run_dir = make_run(tmp_path / "b", SMALL, critic)
    add_groups(run_dir, [[0, 0]] * 40)
    assert the_kind(run_dir) == signals.ZERO
    teacher = ["algo.kl.coef=1", "algo.kl.into=advantage", "algo.reference=teacher"]
    run_dir = make_run(tmp_path / "c", SMALL, *teacher)
    add_groups(run_dir, [[0, 0]] * 40)
    assert not findings(run_dir)


def first_evaluation(run_dir: Path, **values: float) -> None:
    line = {"name": "held-out", "version": 0, "greedy": 0.0, "sampled": 0.0, "samples": 1}
    (run_dir / "evals.jsonl").write_text(json.dumps({**line, "problems": 15, **values}) + "\n")


def test_the_first_evaluation_warns_before_there_are_steps(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "early", steps=2, planned=2)
    add_groups(run_dir, [[0, 0]] * 3)
    first_evaluation(run_dir)
    evidence = the_only(run_dir, "no_signal", Severity.HINT)
    assert evidence.startswith("none of 30 answers is right in the first evaluation\n  reward 0: ")
    for values in ({"greedy": 0.1}, {"sampled": 0.1}, {"problems": 14}):
        first_evaluation(run_dir, **values)
        assert not findings(run_dir)
    trained = make_run(tmp_path / "trained", steps=STEPS)
    first_evaluation(trained)
    assert not findings(trained)


def test_the_panel_names_it_first(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", SMALL, loop_lag_p99_s=0.4, ess=0.2)
    add_groups(run_dir, [[0, 0]] * 40)
    notices = finding_notices(diagnose(read_history(run_dir, END)), run_dir)
    assert notices[0] == Notice("alarm", "No signal: nearly no answer is rewarded")


def test_the_summary_has_the_answers(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", SMALL)
    add_groups(run_dir, [[0, 0]] * 40, prompt="[red]question")
    summary = CONSOLE.summarize(load_config(run_dir), run_dir, T0, END)
    assert summary["no_signal"] == missing_signal(run_dir)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary_table(summary))
    shown = console.export_text()
    assert "nearly no answer is rewarded" in shown and "[red]question 39" in shown
    add_groups(run_dir := make_run(tmp_path / "well", SMALL), [[0, 1]] * 40)
    summary = CONSOLE.summarize(load_config(run_dir), run_dir, T0, END)
    assert summary["no_signal"] is None


def test_a_reward_that_was_learned_and_lost_is_named_as_such(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", SMALL, reward_mean=lambda step: 0.7 * (step < 18))
    add_groups(run_dir, [[0, 0]] * 40)
    the_only(run_dir, "reward_collapse", Severity.ALARM)
