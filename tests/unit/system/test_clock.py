"""A wall clock that does not follow jumps."""

import time

import pytest

from areal_lite.system.processes import steady_time


def test_it_does_not_follow_a_jump_of_the_clock(monkeypatch) -> None:
    before = steady_time()
    assert before == pytest.approx(time.time(), abs=60)
    for jumped in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda jumped=jumped: jumped)
        assert 0 <= steady_time() - before < 60
