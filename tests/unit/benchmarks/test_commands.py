"""Each benchmark's command can be started: what it imports is there."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_script_finds_what_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script runs with its own folder first on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    modules = dict(sys.modules)
    spec = importlib.util.spec_from_file_location(f"_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
    try:
        spec.loader.exec_module(module)
    finally:
        for own in BENCHMARKS.glob("*.py"):  # names as short as `launch` are not left to others
            if own.stem not in modules:
                sys.modules.pop(own.stem, None)
