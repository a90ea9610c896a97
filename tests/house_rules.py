"""Check the sizes of files, functions and rooms, and that every room is in a layer.

`python tests/house_rules.py` prints each violation and exits with 1 if there is one.
CONTRIBUTING.md lists the rules.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_COLUMNS = 100
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 45
MAX_ROOM_SHARE = 0.18
# Parts of the package that plug into the core, which no layer of it may import.
PARTS = {"clusters", "cpu", "delta", "environments", "tools", "workflows"}
# Tools read these comments, which cannot be wrapped. The linter's line rule leaves them out, too.
PRAGMA = re.compile(r"\s*# (?:noqa|pyright: ignore)\b.*")
PLACEHOLDER = "TODO docstring"


def tracked(*patterns: str) -> list[Path]:
    """List the files in git that match `patterns`, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for line in listed.splitlines() if (path := ROOT / line).is_file()]


def long_lines(path: Path) -> Iterator[str]:
    """Name the lines that are too long."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if (columns := len(PRAGMA.sub("", line))) > MAX_COLUMNS:
            yield f"{path.relative_to(ROOT)}:{number}: {columns} columns, at most {MAX_COLUMNS}"


def large_shapes(path: Path) -> Iterator[str]:
    """Name each long file and function of shipped code, and each placeholder."""
    name, source = path.relative_to(ROOT), path.read_text()
    if (lines := source.count("\n")) > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_FILE_LINES}: split it by what it does"
    if PLACEHOLDER in source:
        yield f"{name}: a docstring is missing"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                at = f"{name}:{node.lineno}: {node.name}"
                yield f"{at} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def rooms(package: list[Path]) -> Iterator[str]:
    """Name a room that is too large, and one that the layers in pyproject.toml do not mention."""
    sizes: Counter[str] = Counter()
    for path in package:
        sizes[path.relative_to(ROOT / "areal_lite").parts[0]] += path.read_text().count("\n")
    total = sizes.total()
    parts = PARTS & sizes.keys()
    for room, lines in sizes.items():
        if room in parts:
            continue
        if lines > MAX_ROOM_SHARE * total:
            share = f"{lines / total:.1%} of the package, at most {MAX_ROOM_SHARE:.0%}"
            yield f"areal_lite/{room}: {share}"
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = " | ".join(next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers"))
    layered = {name.removeprefix("areal_lite.") for name in re.findall(r"[\w.]+", layers)}
    named = {name.removesuffix(".py") for name in sizes}
    for room in sorted(named - layered - parts - {"__init__"}):
        yield f"areal_lite/{room}: not in the layers of [tool.importlinter] in pyproject.toml"


def main() -> int:
    """Print every violation and return the exit status."""
    package, quickstart = tracked("areal_lite/*.py"), tracked("examples/quickstart/*.py")
    violations = [
        *(v for path in tracked("*.py", "*.sh", ".ci/run") for v in long_lines(path)),
        *(v for path in [*package, *quickstart] for v in large_shapes(path)),
        *rooms(package),
    ]
    print(*violations, sep="\n", end="\n" if violations else "")
    lines = sum(path.read_text().count("\n") for path in package)
    print(f"house rules: {len(violations)} violations; the package has {lines} lines")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
