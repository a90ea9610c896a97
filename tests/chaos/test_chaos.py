"""Real runs under a schedule of faults: each learns, and its files prove that nothing was lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import pytest

from tests.chaos.chaos_run import BOUND, ChaosRun
from tests.chaos.schedule import Fault, long_schedule, short_schedule
from tests.integration.conftest import tiny_model  # noqa: F401
from tests.integration.controller_run import wrong_with

SHORT_SEED, SHORT_STEPS = 1, 24
LONG_SEEDS, LONG_STEPS, LONG_FAULTS = range(6), 44, 20

TRANSPORTS = ("memory", "distributed", "disk")

Start = Callable[[int, str], ChaosRun]


@pytest.fixture
def start(tmp_path: Path, tiny_model: str) -> Iterator[Start]:  # noqa: F811
    """start(steps, transport) -> a run that has begun, which is ended with the test."""
    runs: list[ChaosRun] = []

    def make(steps: int, transport: str) -> ChaosRun:
        runs.append(ChaosRun(tmp_path / "run", tiny_model, steps, transport))
        return runs[-1]

    yield make
    for made in runs:
        made.close()


def check_survival(run: ChaosRun, faults: list[Fault], steps: int) -> None:
    """Let faults happen to a run, wait for its end, and check what it left behind."""
    for fault in faults:
        print(fault)  # pytest shows it if the test fails
        run.strike(fault)
    assert run.wait(300) == 0, run.output()
    assert run.processes() == []
    assert wrong_with(run.folder) == {}
    metrics = run.lines("metrics")
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    assert [m["version"] for m in metrics] == list(range(1, steps + 1))
    assert [evaluation["version"] for evaluation in run.lines("evals")] == [0, steps]
    rewards, quarter = [m["reward_mean"] for m in metrics], steps // 4
    assert mean(rewards[-quarter:]) > mean(rewards[:quarter]) + 0.05, "it did not learn"
    assert min(m["time_s"] for m in metrics) >= 0, "a duration followed a jump of the clock"
    assert max(m["staleness_max"] for m in metrics) <= BOUND
    assert any(m["verified"] for m in metrics), "no tensor was read back from a server"
    assert all(m["logprob_diff"] is None or m["logprob_diff"] < 1e-4 for m in metrics), (
        "weights are not those that the version names"
    )


@pytest.mark.timeout(600)
def test_a_run_survives_fourteen_faults_of_as_many_kinds(start: Start) -> None:
    run = start(SHORT_STEPS, TRANSPORTS[0])
    check_survival(run, short_schedule(SHORT_SEED, SHORT_STEPS), SHORT_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_runs_survive_a_hundred_faults(start: Start, seed: int) -> None:
    run = start(LONG_STEPS, TRANSPORTS[seed % len(TRANSPORTS)])
    check_survival(run, long_schedule(seed, LONG_STEPS, LONG_FAULTS), LONG_STEPS)
