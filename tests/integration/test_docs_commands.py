"""The commands of the documentation really run: tests/docs_commands.py says how."""

from pathlib import Path

import pytest

from tests.docs_commands import PAGES, ROOT, commands, run_page, runs_here

RUN_HERE = [page for page in PAGES if any(map(runs_here, commands(page)))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(page: Path, tmp_path_factory) -> None:
    pages = tmp_path_factory.getbasetemp() / "pages"
    name = "-".join(page.relative_to(ROOT).parts)
    assert run_page(page, pages / name) == sum(map(runs_here, commands(page)))
