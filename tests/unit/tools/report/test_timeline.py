"""Counts and times of a run against slow, plain versions of the same."""

import json
from pathlib import Path

import numpy as np
import pytest

from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.reader import RunReader
from areal_lite.tools.report.charts import POINTS, histogram, smooth, staleness_tokens, thinned
from areal_lite.tools.report.rollouts import MAX_GROUPS, choose_groups, group_rewards
from areal_lite.tools.report.run_data import Columns, read_columns, read_run
from areal_lite.tools.report.summary import count_facts, training_s
from areal_lite.tools.report.timeline import (
    BARS,
    build_windows,
    downtime_s,
    mean_open,
    pack,
    requests_open,
    time_edges,
    tokens_per_s,
    trainer_spans,
)
from tests.unit.tools.report.synthetic_run import simulate

RNG = np.random.default_rng(3)


def random_spans(count: int) -> tuple[np.ndarray, np.ndarray]:
    starts = RNG.uniform(0, 10, count)
    return starts, starts + RNG.exponential(1.5, count)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    simulate(folder, steps=10)
    return folder


@pytest.fixture(scope="module")
def columns(run: Path) -> Columns:
    return read_columns(run / "trajectories.sqlite")


def stored(run: Path) -> list[dict]:
    store = RunReader(run / "trajectories.sqlite")
    rows = list(store.trajectories())
    store.close()
    return rows


def test_columns_are_those_of_the_store(run: Path, columns: Columns) -> None:
    rows = stored(run)
    assert len(columns) == len(rows) > 300
    for name, key in (("group", "group_id"), ("sample", "sample_index"), ("started", "started_at")):
        assert getattr(columns, name).tolist() == [row[key] for row in rows]
    assert columns.reward.tolist() == [row["reward"] for row in rows]
    assert columns.step.tolist() == [-1 if r["step"] is None else r["step"] for r in rows]
    for index, row in enumerate(rows):
        assert columns.segments(index) == [(v, end - start) for v, start, end in row["segments"]]
        assert columns.sampled[index] == (row["versions"] >= 0).sum()
    assert columns.oldest.tolist() == [row["min_version"] for row in rows]
    assert columns.newest.tolist() == [row["max_version"] for row in rows]


def test_a_run_without_a_store_has_no_trajectories(tmp_path: Path) -> None:
    columns = read_columns(tmp_path / "trajectories.sqlite")
    assert len(columns) == 0 and time_edges(columns, [], 9) is None
    (tmp_path / "metrics.jsonl").touch()
    assert count_facts(read_run(tmp_path))["trajectories"] == 0


def test_a_damaged_store_is_one_line_that_says_what_to_do(run: Path, tmp_path: Path) -> None:
    content = (run / "trajectories.sqlite").read_bytes()
    damaged = tmp_path / "trajectories.sqlite"
    damaged.write_bytes(content[:8192] + bytes([255]) * (len(content) - 8192))
    with pytest.raises(ValueError, match="trajectories.sqlite: .*: restore the file from a copy"):
        read_columns(damaged)
    damaged.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty, .* or that of another version"):
        read_columns(damaged)


def test_staleness_counts_every_token_of_used_trajectories(run: Path, columns: Columns) -> None:
    expected: dict[int, int] = {}
    for row in stored(run):
        for version in row["versions"][row["versions"] >= 0].tolist() if row["step"] else ():
            late = max(0, row["step"] - version)
            expected[late] = expected.get(late, 0) + 1
    for row in stored(run):
        if row["step"] == 0:
            expected[0] = expected.get(0, 0) + int((row["versions"] >= 0).sum())
    found = staleness_tokens(columns)
    assert {late: int(count) for late, count in enumerate(found) if count} == expected


@pytest.mark.parametrize("values", ([5], [1, 1, 9], list(range(100)), [0, 1000], []))
def test_a_histogram_counts_every_value_once(values: list[int]) -> None:
    edges, counts = histogram(np.array(values, np.int64), bins=7)
    assert len(counts) <= 7 and len(edges) == len(counts) + 1 and counts.sum() == len(values)
    for low, high, count in zip(edges, edges[1:], counts):
        assert count == sum(low <= value < high for value in values)


def test_mean_open_is_the_integral_of_open_spans() -> None:
    starts, ends = random_spans(50)
    weights = RNG.uniform(0, 3, 50)
    edges = np.linspace(-1, 13, 40)
    for low, high, found in zip(edges, edges[1:], mean_open(starts, ends, edges, weights)):
        overlap = np.clip(np.minimum(ends, high) - np.maximum(starts, low), 0, None)
        assert found == pytest.approx((weights * overlap).sum() / (high - low), abs=1e-9)


def test_rates_and_requests_add_up_to_the_run(run: Path, columns: Columns) -> None:
    edges = time_edges(columns, read_metrics(run), 240)
    assert edges is not None
    width = edges[1] - edges[0]
    assert tokens_per_s(columns, edges).sum() * width == pytest.approx(columns.sampled.sum())
    seconds = sum(open_.sum() for open_ in requests_open(columns, edges).values()) * width
    assert seconds == pytest.approx((columns.finished - columns.started).sum())


def test_the_trainer_never_does_two_things(run: Path) -> None:
    metrics = read_metrics(run)
    ends = [m["logged_at"] for m in metrics]
    timed = [
        {**m, "push_s": 0.2, "train_s": 0.5, "wait_s": min(3.0, (end - before) - 0.7)}
        for m, end, before in zip(metrics, ends, [ends[0] - 4, *ends])
    ]
    spans = trainer_spans(timed)
    assert list(spans) == ["waits for a batch", "trains", "pushes weights"]
    starts, stops = (np.sort(np.concatenate(side)) for side in zip(*spans.values()))
    assert (starts[1:] >= stops[:-1] - 1e-6).all()
    for key, (begin, end) in zip(("wait_s", "train_s", "push_s"), spans.values()):
        assert end - begin == pytest.approx([m[key] for m in timed], abs=1e-6)


def test_packed_spans_of_a_lane_never_overlap() -> None:
    starts, ends = random_spans(80)
    order = np.argsort(starts)
    starts, ends = starts[order], ends[order]
    lanes = RNG.integers(0, 2, 80).tolist()
    rows = pack(lanes, starts.tolist(), ends.tolist())
    for one in range(80):
        for other in range(one):
            if (lanes[one], rows[one]) == (lanes[other], rows[other]):
                assert starts[one] >= ends[other]
    for lane in (0, 1):
        open_at = [
            sum(s <= t < e for s, e, own in zip(starts, ends, lanes) if own == lane) for t in starts
        ]
        assert max(r for r, own in zip(rows, lanes) if own == lane) + 1 == max(open_at)


def test_windows_show_the_bars_that_are_inside(run: Path, columns: Columns) -> None:
    windows = build_windows(columns, read_metrics(run))
    assert [window["name"] for window in windows] == ["the start", "the middle", "the end"]
    for window in windows:
        assert len(window["bars"]) == min(BARS, window["total"])
        for bar in window["bars"]:
            spans = bar["spans"]
            assert spans[0][1] < window["end"] and spans[-1][2] > window["start"]
            assert all(one[2] == other[1] for one, other in zip(spans, spans[1:]))


def test_a_window_begins_with_the_version_that_the_servers_have(run: Path, columns) -> None:
    rarely = [
        row if row["version"] % 4 == 0 else {**row, "paused_at": None, "pause_s": None}
        for row in read_metrics(run)
    ]
    (window,) = build_windows(columns, rarely)
    assert window["version"] == 0 and [version for version, *_ in window["pushes"]] == [4, 8]
    for window in build_windows(columns, read_metrics(run)):
        assert window["version"] == window["pushes"][0][0] - 1


def test_chosen_groups_are_the_worst_the_best_and_the_recorded(columns: Columns) -> None:
    ids, steps, rewards = group_rewards(columns)
    recorded = {int(step): int(ids[steps == step][1]) for step in np.unique(steps)}
    chosen = choose_groups(columns, recorded)
    assert len(chosen) == len(set(chosen)) <= MAX_GROUPS
    for step in np.unique(steps):
        here = {
            int(group): reward for group, reward in zip(ids[steps == step], rewards[steps == step])
        }
        mine = [group for group in chosen if group in here]
        assert {min(here.values()), max(here.values())} <= {here[group] for group in mine}
        assert recorded[int(step)] in mine and len(mine) <= 3


def test_the_tokens_of_a_page_are_bounded(columns: Columns, monkeypatch) -> None:
    monkeypatch.setattr("areal_lite.tools.report.rollouts.MAX_TOKENS", 5000)
    chosen = choose_groups(columns, {})
    assert 0 < columns.tokens[np.isin(columns.group, chosen)].sum() <= 5000
    assert len(set(columns.step[np.isin(columns.group, chosen)].tolist())) == len(chosen)


@pytest.mark.parametrize("count", (0, 1, 6, POINTS, POINTS + 1, 5 * POINTS + 3))
def test_long_lines_are_thinned_to_means(count: int) -> None:
    x = np.arange(count, dtype=np.float64)
    thin_x, thin_y = thinned(x, 2 * x)
    assert len(thin_x) <= POINTS and thin_y == pytest.approx(2 * thin_x)
    assert (count > POINTS) or thin_x.tolist() == x.tolist()
    mean = [x[max(0, i - 3) : i + 4].mean() for i in range(count)]
    assert smooth(x) == pytest.approx(mean)


def test_a_running_mean_ignores_unknown_values() -> None:
    nan = np.nan
    assert smooth([2.0, nan, 4.0], window=3) == pytest.approx([2.0, 3.0, 4.0])
    assert smooth([nan, nan, 1.0], window=3) == pytest.approx([nan, 1.0, 1.0], nan_ok=True)
    assert smooth([]).tolist() == []


def test_the_time_between_two_starts_is_no_time_of_the_run(tmp_path: Path) -> None:
    simulate(tmp_path, steps=4)
    path = tmp_path / "metrics.jsonl"
    metrics = read_metrics(tmp_path)
    for before, step in zip([None, *metrics], metrics):
        step["time_s"] = step["logged_at"] - before["logged_at"] if before else 1.0
    path.write_text("".join(json.dumps(step) + "\n" for step in metrics))
    before = training_s(read_run(tmp_path))
    assert downtime_s(metrics) == pytest.approx(0.0, abs=1e-6)
    assert count_facts(read_run(tmp_path))["training_s"] == pytest.approx(before)
    for step in metrics[2:]:
        step["logged_at"] += 3600.0  # the run was killed, and resumed an hour later
    path.write_text("".join(json.dumps(step) + "\n" for step in metrics))
    assert downtime_s(metrics) == pytest.approx(3600.0)
    assert training_s(read_run(tmp_path)) == pytest.approx(before)
    assert count_facts(read_run(tmp_path))["training_s"] == pytest.approx(before)
