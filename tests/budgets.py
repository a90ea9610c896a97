"""Hold the package to its size: `python tests/budgets.py` prints each measure next to its budget.

It exits with 1 if a measure is above its budget. A change may raise a budget only by what it
states in CHANGELOG.md. CONTRIBUTING.md (Scope) says what a new option must prove.

Where `goal` is below `budget`, the package is on its way there: a change lowers the budget to what
it has reached, and never raises it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.house_rules import PARTS, tracked  # noqa: E402

Graph = dict[str, set[str]]
"""Module -> the modules of the package that it imports."""


@dataclass(frozen=True)
class Measure:
    """A number that may not be above `budget`, and the budget that it is on its way to."""

    name: str
    found: int
    budget: int
    goal: int


def modules() -> dict[str, Path]:
    """Return the files of the package by the names of their modules."""
    files = {}
    for path in tracked("areal_lite/*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports(files: dict[str, Path]) -> Graph:
    """Return what each module imports, inside functions too, but not for annotations alone."""
    graph: Graph = {name: set() for name in files}
    for name, path in files.items():
        for node in _executed(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & files.keys()
                graph[name] |= inner or ({node.module} & files.keys())
    return graph


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` without those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _executed(child)


def single_consumers(files: dict[str, Path], graph: Graph) -> list[str]:
    """List the modules that one module of the same folder imports, and no other."""
    found = []
    for name, path in files.items():
        users = [user for user in graph if name in graph[user] and user != name]
        if len(users) == 1 and path.name != "__init__.py":
            found += [name] * (files[users[0]].parent == path.parent)
    return found


def circles(graph: Graph) -> Iterator[str]:
    """Yield each module that imports itself over others, when it is loaded or later."""
    reached: Graph = {}

    def reach(name: str) -> set[str]:
        if name not in reached:
            reached[name] = set()
            stack = list(graph[name])
            while stack:
                if (module := stack.pop()) not in reached[name]:
                    reached[name].add(module)
                    stack += graph[module]
        return reached[name]

    yield from (name for name in graph if name in reach(name))


def part_of(module: str) -> str:
    """Return the part of the package that a module belongs to; "" for the core."""
    room = module.split(".")[1] if "." in module else ""
    return room if room in PARTS else ""


def names_of_parts(files: dict[str, Path], graph: Graph) -> list[str]:
    """List the modules of the core that name a part, by an import or in a string of code."""
    pattern = re.compile(rf"areal_lite(_quickstart|\.({'|'.join(sorted(PARTS))}))\b")
    found = []
    for name, path in files.items():
        if part_of(name):
            continue
        tree = ast.parse(path.read_text())
        documentation = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        strings = (
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in documentation
        )
        if any(map(part_of, graph[name])) or any(map(pattern.search, strings)):
            found.append(name)
    return found


def measures() -> Iterator[Measure]:
    """Yield every measure."""
    from areal_lite.config.commands import TrainConfig, command_names
    from areal_lite.config.fields import settings_of
    from tests.paths import measure

    files = modules()
    graph = imports(files)
    lines = {name: path.read_text().count("\n") for name, path in files.items()}
    core = {name: count for name, count in lines.items() if not part_of(name)}
    yield Measure("lines of the core", sum(core.values()), 26_050, 23_700)
    yield Measure("files of the core", len(core), 121, 118)
    yield Measure("lines of the package", sum(lines.values()), 41_198, 36_700)
    yield Measure("files of the package", len(lines), 213, 198)
    way = measure()
    yield Measure("files from prompt to batch", len(way.files), 22, 22)
    yield Measure("calls of a request", len(way.calls), 5, 5)
    yield Measure("modules with one consumer", len(single_consumers(files, graph)), 22, 22)
    yield Measure("settings of train", _count_settings(TrainConfig, settings_of), 120, 118)
    yield Measure("commands", len(command_names()), 11, 11)
    yield Measure("core modules that name a part", len(names_of_parts(files, graph)), 0, 0)
    yield Measure("modules in an import circle", len(list(circles(graph))), 0, 0)


def _count_settings(schema, settings_of) -> int:
    from areal_lite.config.fields import sections

    return sum(len(settings_of(section)) for _, section in sections(schema))


def main() -> int:
    """Print every measure and return the exit status."""
    failed = 0
    for measure in measures():
        above = measure.found > measure.budget
        failed += above
        goal = f", goal {measure.goal:,}" if measure.goal != measure.budget else ""
        mark = "ABOVE" if above else "ok"
        print(f"{mark:>5}  {measure.name:<32}{measure.found:>8,}  budget {measure.budget:,}{goal}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
