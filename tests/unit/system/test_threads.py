"""Daemon threads hand on results and errors."""

import pytest

from areal_lite.system.processes import start_daemon


def test_results_and_errors_arrive():
    assert start_daemon(max, 1, 2).result(5) == 2
    with pytest.raises(ZeroDivisionError):
        start_daemon(lambda: 1 // 0).result(5)
