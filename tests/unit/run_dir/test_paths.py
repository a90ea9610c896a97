"""The layout of a run directory."""

import re
from pathlib import Path

import areal_lite
from areal_lite.run_dir import paths

PACKAGE = Path(areal_lite.__path__[0])


def test_a_file_name_is_spelled_once() -> None:
    names = [value for key, value in vars(paths).items() if key.endswith("_FILE") and "." in value]
    spelled = re.compile("|".join(f'"{re.escape(name)}"' for name in names))
    owners = {PACKAGE / "run_dir" / "paths.py", PACKAGE / "config" / "files.py"}
    for source in sorted(set(PACKAGE.rglob("*.py")) - owners):
        found = spelled.search(source.read_text())
        assert not found, f"{source} spells {found[0]}: use areal_lite/run_dir/paths.py"


def test_each_name_says_what_it_is_for() -> None:
    source = (PACKAGE / "run_dir" / "paths.py").read_text()
    for key in vars(paths).keys() - {"CONFIG_FILE"}:
        if key.endswith(("_FILE", "_DIR", "_MARKER")):
            assert re.search(rf"^{key} = .*  # \w", source, re.MULTILINE), key
