"""The average of the weights in checkpoints of the real engine, in any layout."""

from pathlib import Path

import pytest
import torch

from tests.ranks.test_checkpoint import LAYOUTS, contents, folder, tell  # noqa: F401

AVERAGE = {"average_decay": 0.6}


def resumed(place: str, into: str) -> dict:
    return {"tell": "resumed", "args": {"folder": place, "into": into}, "settings": AVERAGE}


def _when(layout: str):
    return layout if layout in ("single", "dp2") else pytest.param(layout, marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=map(_when, LAYOUTS))
def run(folder: Path, request: pytest.FixtureRequest) -> dict:  # noqa: F811
    """Train with a penalty on the distance from the average; also from a checkpoint."""
    name, place = request.param, str(folder / f"average-{request.param}")
    whole = {"tell": "uninterrupted", "args": {"folder": place}, "settings": AVERAGE}
    stories = {"first": whole, "again": resumed(place, f"{place}-again")}
    told = tell(folder, f"average-{name}", LAYOUTS[name], stories)
    return told | {"place": place, "last": contents(Path(place) / "step-6")}


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(run: dict) -> None:
    assert run["again"]["second"] == run["first"]["second"]
    first, again = run["last"], contents(Path(f"{run['place']}-again") / "step-6")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    averages = {key.replace(".average.", "."): key for key in first if ".average." in key}
    weights = [key for key in first if ".average." not in key and ".optimizer." not in key]
    assert len(averages) == len(weights)
    assert all(first[key].dtype == torch.float32 for key in averages.values())


def test_a_checkpoint_of_any_layout_continues_on_one_process(run: dict, folder: Path) -> None:  # noqa: F811
    place = run["place"]
    story = {"again": resumed(place, f"{place}-one")}
    told = tell(folder, f"{Path(place).name}-one", {}, story)
    for got, want in zip(told["again"]["second"], run["first"]["second"], strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    other = contents(Path(f"{place}-one") / "step-6")
    for key in (key for key in run["last"] if ".average." in key):
        torch.testing.assert_close(other[key], run["last"][key], rtol=0, atol=1e-6, msg=key)


def test_a_checkpoint_without_an_average_is_refused(folder: Path) -> None:  # noqa: F811
    place = str(folder / "no-average")
    told = tell(
        folder,
        "no-average",
        {},
        {
            "first": {"tell": "uninterrupted", "args": {"folder": place}},
            "refused": {"tell": "refused", "args": {"folder": place}, "settings": AVERAGE},
        },
    )
    assert "this checkpoint holds no average of the weights" in told["refused"]
