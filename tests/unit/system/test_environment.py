"""A variable is changed in a block only, also when the block fails."""

import os

import pytest

from areal_lite.system.processes import environment


@pytest.mark.parametrize("before", [None, "old"])
def test_a_variable_is_restored(monkeypatch, before):
    if before is not None:
        monkeypatch.setenv("AREAL_LITE_TEST", before)
    with pytest.raises(KeyError), environment("AREAL_LITE_TEST", "new"):
        assert os.environ["AREAL_LITE_TEST"] == "new"
        raise KeyError
    assert os.environ.get("AREAL_LITE_TEST") == before
