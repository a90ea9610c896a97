"""The content of a wheel: every file of the package and of `conf`, and nothing else."""

import configparser
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house_rules import tracked

ROOT = Path(__file__).resolve().parents[2]
METADATA = "areal_lite-0.1.0.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, *build, str(ROOT)], check=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_a_wheel_has_the_files_of_the_package_and_no_others(wheel: zipfile.ZipFile) -> None:
    package = {str(path.relative_to(ROOT)) for path in tracked("areal_lite")}
    conf = {f"areal_lite/{path.relative_to(ROOT)}" for path in tracked("conf")}
    example = ROOT / "examples" / "quickstart"
    quickstart = {str(path.relative_to(example)) for path in tracked("examples/quickstart")}
    found = {name for name in wheel.namelist() if not name.startswith(METADATA)}
    assert found == package | conf | quickstart


def test_its_entry_points_are_in_it(wheel: zipfile.ZipFile) -> None:
    entries = configparser.ConfigParser(delimiters="=")
    entries.read_string(wheel.read(f"{METADATA}/entry_points.txt").decode())
    modules = {
        entries[group][name].partition(":")[0] for group in entries for name in entries[group]
    }
    assert "areal_lite.sglang_plugins.push" in modules
    for module in modules:
        path = module.replace(".", "/")
        assert {f"{path}.py", f"{path}/__init__.py"} & set(wheel.namelist()), module
