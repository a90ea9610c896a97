"""The report: geometry of the timeline, rates, and a picture from any run directory."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from areal_lite.tools.report.charts import charts_of, smooth
from areal_lite.tools.report.figure import _label_versions, draw_chart, write_report
from areal_lite.tools.report.run_data import read_run
from areal_lite.tools.report.timeline import pushes_of, segment_spans, tokens_per_s
from tests.unit.tools.report.synthetic_run import T0, hand_made, simulate

PUSHES = {1: (10.0, 0.5), 2: (20.0, 0.5), 3: (30.0, 0.5)}


def test_versions_change_where_they_were_pushed():
    spans = segment_spans(8.0, 25.0, [(0, 5), (1, 2), (2, 78)], PUSHES)
    assert spans == [(0, 8.0, 10.0), (1, 10.0, 20.0), (2, 20.0, 25.0)]


def test_a_version_that_sampled_no_token_has_no_span():
    assert segment_spans(8.0, 35.0, [(0, 5), (3, 10)], PUSHES) == [
        (0, 8.0, 30.0),
        (3, 30.0, 35.0),
    ]


def test_two_turns_of_one_version_are_one_span():
    spans = segment_spans(12.0, 24.0, [(1, 5), (1, 5), (2, 5)], PUSHES)
    assert spans == [(1, 12.0, 20.0), (2, 20.0, 24.0)]


def test_an_unknown_push_lies_where_the_share_of_tokens_puts_it():
    assert segment_spans(100.0, 140.0, [(7, 10), (8, 30)], PUSHES) == [
        (7, 100.0, 110.0),
        (8, 110.0, 140.0),
    ]


def test_spans_stay_within_the_life_of_the_trajectory():
    spans = segment_spans(12.0, 15.0, [(0, 5), (1, 2), (2, 8)], PUSHES)
    assert spans == [(0, 12.0, 12.0), (1, 12.0, 15.0), (2, 15.0, 15.0)]
    assert segment_spans(1.0, 2.0, [], PUSHES) == []


def test_the_integral_of_the_generation_rate_is_the_tokens():
    columns = SimpleNamespace(
        started=np.array([10.0, 15.0]),
        finished=np.array([20.0, 40.0]),
        sampled=np.array([100, 50]),
    )
    edges = np.linspace(10.0, 40.0, 61)
    rate = tokens_per_s(columns, edges)
    assert (rate * np.diff(edges)).sum() == pytest.approx(150)
    assert (
        rate[0] == pytest.approx(10.0)
        and rate[15] == pytest.approx(12.0)
        and rate[-1] == pytest.approx(2.0)
    )


def test_a_run_killed_within_a_push_has_the_pushes_it_logged(tmp_path):
    hand_made(tmp_path, killed=True)
    run = read_run(tmp_path)
    assert pushes_of(run.metrics) == {1: (T0 + 5, 0.1)} and run.staleness_bound == 2


@pytest.mark.parametrize(
    "make",
    [hand_made, partial(hand_made, killed=True), partial(simulate, steps=6)],
)
def test_a_picture_of_any_run(tmp_path, make):
    make(tmp_path)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.png" and not list(tmp_path.glob(".report*"))
    picture = imread(path)[..., :3]
    assert picture.shape == (1200, 1600, 3)
    assert (picture != 1.0).any()


def test_a_name_with_dollars_is_no_formula(tmp_path):
    run_dir = tmp_path / "cost_$5_vs_$6"
    run_dir.mkdir()
    hand_made(run_dir)
    assert write_report(run_dir).is_file()


def test_each_data_source_has_a_line(tmp_path):
    simulate(tmp_path, steps=6)
    path = tmp_path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["reward_mean/short"] = None if row["step"] == 2 else row["step"] / 10
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    axes = Figure().add_subplot()
    draw_chart(axes, charts_of(run)["reward"])
    lines = {line.get_label(): line for line in axes.get_lines()}
    line = lines["reward, short"]
    assert list(line.get_xdata()) == [0, 1, 3, 4, 5]
    mean = smooth([row["reward_mean/short"] for row in rows if row["step"] != 2])
    np.testing.assert_allclose(line.get_ydata(), mean, rtol=1e-5)


def test_the_timeline_shows_versions_in_their_colors(tmp_path):
    hand_made(tmp_path)
    timeline = imread(write_report(tmp_path))[620:1100, :, :3]
    blue, orange = np.array([0x2B, 0x6C, 0xB0]) / 255, np.array([0xDD, 0x7A, 0x1F]) / 255
    for color in (blue, orange):
        assert (np.abs(timeline - color).max(-1) < 0.02).mean() > 0.03
    columns = [
        np.flatnonzero((np.abs(timeline - color).max(-1) < 0.02).any(0)) for color in (blue, orange)
    ]
    assert columns[0].max() < columns[1].min(), "version 0 is left of the push, version 1 right"


def test_the_strip_begins_with_the_version_before_the_first_push():
    """With sync.every=4, version 4 follows version 0."""
    axes = Figure().subplots()
    pushes = [[4, 10.0, 10.5], [8, 20.0, 20.5]]
    _label_versions(axes, {"version": 0, "start": 0.0, "end": 30.0, "pushes": pushes})
    assert [text.get_text() for text in axes.texts] == ["version 0", "version 4", "version 8"]


def test_a_chart_may_have_a_series_without_points():
    """As the staleness of a run that never trained."""
    lines = [{"name": n, "style": "line", "x": x, "y": x} for n, x in (("a", []), ("b", [1, -2]))]
    axes = Figure().subplots()
    draw_chart(axes, {"title": "t", "x": "x", "y": "y", "series": lines})
    assert axes.get_ylim()[0] == -2
