"""The findings about adapters, replayed routes, teachers, traces, data sources and critics."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from areal_lite.tools.diagnose import learning
from areal_lite.tools.diagnose.diagnosis import GUIDE
from areal_lite.tools.diagnose.history import Severity
from areal_lite.workflows.agent import Agent
from tests.unit.tools.diagnose import test_findings
from tests.unit.tools.diagnose.test_findings import findings, make_run, the_only

ALARM, HINT = Severity.ALARM, Severity.HINT
LORA = ["trainer.lora.rank=8"]
REPLAY = ["algo.routing_replay=true"]
TEACHER = ["algo.advantage.estimator='off'", "algo.reference=teacher", "algo.kl.coef=1"]
AGENT = ["rollout.workflow=areal_lite.workflows.agent:Agent"]
SOURCES = [
    "data.sources.sums.args.max_digits=2",
    "data.sources.sums.weight=3",
    "data.sources.words.path=words.jsonl",
]
CRITIC = ["algo.advantage.estimator=gae"]
BALANCED = {"groups/sums": 12, "groups/words": 4}

# name, severity, settings, what the run has, a number of the evidence, and what takes it away: in
# the records, or in the settings.
CASES: list[tuple[str, Severity, list[str], dict[str, Any], str, dict[str, Any]]] = [
    (
        "lost_seed",
        ALARM,
        [],
        {"distinct_share": 0.13},
        "1.04 different completions in a group of 8, and a completion has 40 nats",
        {"entropy": 0.02},  # a certain policy repeats itself
    ),
    ("lost_seed", ALARM, [], {"distinct_share": 0.15}, "1.20 different", {"distinct_share": 0.16}),
    (
        "faint_adapters",
        HINT,
        LORA,
        {"adapter_share": lambda step: 4e-5 * step},
        "after 30 steps the adapters have 0.0012 of the size",
        {"adapter_share": lambda step: 4e-4 * step},
    ),
    (
        "faint_adapters",
        HINT,
        LORA,
        {"adapter_share": 1e-4},
        "reward 0.60 -> 0.60",
        {"reward_mean": lambda step: 0.3 + 0.01 * step},  # it learns all the same
    ),
    ("lost_routes", ALARM, REPLAY, {"routes_changed": None}, "10 steps", {"routes_changed": 0.01}),
    (
        "changed_routes",
        HINT,
        REPLAY,
        {"routes_changed": lambda step: 0.01 * step},
        "26% of the recorded routes, first 3%",
        {"routes_changed": 0.1},
    ),
    (
        "distant_teacher",
        ALARM,
        TEACHER,
        {"reference_kl": 0.4},
        "0.4 -> 0.4 nats",
        {"reference_kl": lambda step: 0.4 * 0.95**step},
    ),
    (
        "distant_teacher",
        ALARM,
        TEACHER,
        {"reference_kl": lambda step: 0.1 * step},
        "0.3 -> 2.55 nats",
        {"reference_kl": 0.01},  # it was close from the start
    ),
    ("split_episodes", HINT, AGENT, {"traces_mean": 9.0}, "9.0 traces", {"traces_mean": 7.0}),
    (
        "rare_source",
        HINT,
        SOURCES,
        {"groups/sums": 15, "groups/words": lambda step: int(step == 25)},
        "words: 1% of the recent groups, 25% by its weight",
        BALANCED,
    ),
    (
        "silent_source",
        HINT,
        SOURCES,
        {
            **BALANCED,
            "uniform_groups_share": 0.4,
            "uniform_groups_share/sums": 0.2,
            "uniform_groups_share/words": 1.0,
            "reward_mean/words": 0.0,
        },
        "words: 100% of its recent groups have equal rewards, mean reward 0.00",
        {"uniform_groups_share/words": 0.6},
    ),
    (
        "blind_critic",
        HINT,
        CRITIC,
        {"value_explained": -0.2},
        "value_explained -0.20",
        {"value_explained": lambda step: 0.02 * step},
    ),
]


@pytest.mark.parametrize(
    ("name", "severity", "settings", "series", "number", "healthy"),
    CASES,
    ids=[f"{case[0]}-{case[4]}" for case in CASES],
)
def test_a_failure_is_the_only_finding_until_it_is_mended(
    tmp_path: Path,
    name: str,
    severity: Severity,
    settings: list[str],
    series: dict[str, Any],
    number: str,
    healthy: dict[str, Any],
) -> None:
    assert number in the_only(make_run(tmp_path / "ill", *settings, **series), name, severity)
    assert not findings(make_run(tmp_path / "well", *settings, **series | healthy))


def test_every_finding_is_tested() -> None:
    others = {"stalled", "ended_early", "falling_accuracy", "mixed_evaluations", "restarted"}
    others |= {"quarantine"}  # test_findings.py
    others |= {"no_signal"}  # test_signals.py
    tested = {case[0] for case in (*CASES, *test_findings.CASES)}
    assert tested | others == {advice.name for advice in GUIDE}


def test_routes_and_teachers_are_judged_where_they_are_asked_for(tmp_path: Path) -> None:
    assert not findings(make_run(tmp_path / "dense", routes_changed=None))
    beside = [*TEACHER[1:], "algo.advantage.estimator=grpo"]
    assert not findings(make_run(tmp_path / "beside", *beside, reference_kl=0.4))


def test_traces_are_counted_against_the_limit_of_the_agent(tmp_path: Path) -> None:
    more = make_run(tmp_path / "a", *AGENT, "rollout.workflow_args.max_traces=64", traces_mean=9.0)
    assert not findings(more)
    own = make_run(tmp_path / "b", "rollout.workflow=my:own", traces_mean=15.0)
    assert not findings(own)


def test_a_missing_source_is_rare(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", *SOURCES, **{"groups/sums": 16})
    evidence = the_only(run_dir, "rare_source", HINT)
    assert evidence == "words: 0% of the recent groups, 25% by its weight"


def test_the_default_of_max_traces_is_the_agents():
    default = inspect.signature(Agent).parameters["max_traces"].default
    assert learning._MAX_TRACES == default
    assert learning._AGENT == f"{Agent.__module__}:{Agent.__qualname__}"
