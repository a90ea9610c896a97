"""The average of the weights in checkpoints of the real engine, in any layout."""

from pathlib import Path

import pytest
import torch

from tests.integration.test_checkpoint import LAYOUTS, contents, folder, tell  # noqa: F401

AVERAGE = {"average_decay": 0.6}


def stories(place: str, into: str | None = None) -> dict:
    first = {"first": {"tell": "uninterrupted", "args": {"folder": place}, "settings": AVERAGE}}
    again = {"tell": "resumed", "args": {"folder": place, "into": into or f"{place}-again"}}
    return ({} if into else first) | {"again": {**again, "settings": AVERAGE}}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(folder: Path, name: str) -> None:  # noqa: F811
    place = str(folder / f"average-{name}")
    told = tell(folder, f"average-{name}", LAYOUTS[name], stories(place))
    assert told["again"]["second"] == told["first"]["second"]
    first, again = (contents(Path(place + kind) / "step-6") for kind in ("", "-again"))
    assert all(torch.equal(first[key], again[key]) for key in first)
    averages = {key for key in first if ".average." in key}
    weights = {key for key in first if ".average." not in key and ".optimizer." not in key}
    assert len(averages) == len([key for key in weights if key.startswith("policy.")])
    assert all(first[key].dtype == torch.float32 for key in averages)
    if name != "single":
        on_one = tell(folder, f"average-{name}-one", {}, stories(place, f"{place}-one"))
        for got, want in zip(on_one["again"]["second"], told["first"]["second"], strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
        other = contents(Path(f"{place}-one") / "step-6")
        for key in averages:
            torch.testing.assert_close(other[key], first[key], rtol=0, atol=1e-6, msg=key)


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
