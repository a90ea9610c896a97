"""Views of a run whose store has lost the tokens of its first steps: they say so, and go on."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from areal_lite.run_dir.store import Store
from areal_lite.tools.commands import ReportConfig
from areal_lite.tools.report.page import run_page
from areal_lite.tools.report.rollouts import sample_groups, show_matching
from areal_lite.tools.report.run_data import read_columns, read_run
from examples.monitoring.trace import trace_events
from tests.unit.tools.report.synthetic_run import simulate
from tests.unit.tools.report.test_page import Page

STEPS, GROUPS = 6, 4


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run of six steps that has the tokens of the last two."""
    simulate(tmp_path, steps=STEPS, batch_groups=GROUPS)
    return tmp_path


def trim(run_dir: Path, since: int) -> None:
    store = Store(run_dir / "trajectories.sqlite")
    store.trim(1, since)
    store.close()


def shown(run_dir: Path, **filters: int) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    for part in show_matching(run_dir, ReportConfig(**filters)):
        console.print(part)
    return stream.getvalue()


def test_inspect_shows_the_facts_of_a_trajectory_without_its_tokens(run_dir: Path) -> None:
    before = shown(run_dir, step=1, limit=1)
    trim(run_dir, since=4)
    text = shown(run_dir, step=1, limit=1)
    facts = [line for line in before.splitlines() if line.startswith("group 0, sample 0")]
    assert facts and facts[0] in text
    assert "[tokens not kept (store.max_gib); version 0, " in text
    assert "not kept" not in shown(run_dir, step=5, limit=1)


def test_the_page_shows_rollouts_of_the_steps_that_have_their_tokens(run_dir: Path) -> None:
    whole = Page(run_page(run_dir))
    assert {group["step"] for group in whole.rollouts} == {1, 2, 3, 4, 5, 6}
    trim(run_dir, since=4)
    text = run_page(run_dir)
    assert {group["step"] for group in Page(text).rollouts} == {5, 6}
    assert f"Tokens not kept (store.max_gib): {4 * GROUPS} groups." in text
    trim(run_dir, since=STEPS)
    assert f"Tokens not kept (store.max_gib): {STEPS * GROUPS} groups." in run_page(run_dir)


def test_a_group_that_loses_its_tokens_while_a_page_is_made_is_left_out(run_dir: Path) -> None:
    run = read_run(run_dir)
    trim(run_dir, since=4)
    assert {group["step"] for group in sample_groups(run)} == {5, 6}


def test_columns_and_trace_need_no_tokens(run_dir: Path) -> None:
    run = read_run(run_dir)
    events = list(trace_events(run.columns, run.metrics))
    trim(run_dir, since=4)
    columns = read_columns(run_dir / "trajectories.sqlite")
    assert columns.sampled.tolist() == run.columns.sampled.tolist()
    assert columns.kept.tolist() == [step < 0 or step >= 4 for step in columns.step.tolist()]
    assert list(trace_events(columns, run.metrics)) == events
