"""The runs that are part of the package."""

from pathlib import Path

import pytest

from areal_lite.tools.audit.audit import audit
from areal_lite.tools.report.demo import unpack


@pytest.mark.parametrize("name", ["demo", "demo-sync"])
def test_the_books_of_an_unpacked_run_are_right(name: str, tmp_path: Path) -> None:
    """Its settings are those of today: an audit reads them all."""
    checks = audit(unpack(name, tmp_path), tokens=True)
    assert [check.name for check in checks if check.wrong] == []
    assert len(checks) >= 11
