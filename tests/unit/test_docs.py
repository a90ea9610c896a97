"""The pages for readers: what they link to and name exists, and their commands compose."""

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import areal_lite
from areal_lite.api import TrainResult
from areal_lite.cli import parse
from areal_lite.config import command_names, find_command
from areal_lite.config.command_line import as_overrides, compose_config
from tests import docs_commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOLDERS = "areal_lite|benchmarks|conf|docs|examples|tests"
# A path that starts at the root of the checkout, and a module or an object of it.
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*<>-]*\w(?:::\w+)?")
PLACEHOLDER = re.compile(r"<\w+>")
MODULE = re.compile(r"(?<![\w./])areal_lite(?:\.\w+)+(?::\w+(?![\w.]*\.md))?")
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`")
FILES = (".yaml", ".json", ".jsonl", ".py")  # no settings, although they look like it
FLAGS = ("--dry-run", "--prepare", "--print", "--help", "--cfg", "job")  # not settings

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every `areal-lite …` command line, in code blocks and in sentences."""
    blocks = FENCED.findall(text)
    lines = [line for _, body in blocks for line in body.replace("\\\n", " ").splitlines()]
    for line in [*lines, *re.findall(r"`([^`\n]+)`", FENCED.sub("", text))]:
        words = shlex.split(line, comments=True) if "areal-lite " in line or "bash " in line else []
        if words[:2] == ["bash", "examples/quickstart.sh"]:
            yield ["quickstart", *words[2:]]
        elif words[:1] == ["areal-lite"] and words[1] in command_names():
            yield words[1:]


@cache
def known_keys() -> frozenset[str]:
    """List every key of every command's settings, with its sections."""

    def walk(node: object, prefix: str) -> Iterator[str]:
        for key, value in node.items() if isinstance(node, dict) else ():
            yield prefix + key
            yield from walk(value, f"{prefix}{key}.")

    schemas = (find_command(name).schema for name in command_names())
    settings = (OmegaConf.to_container(OmegaConf.structured(one)) for one in schemas)
    return frozenset(key for command in settings for key in walk(command, ""))


def free_keys() -> set[str]:
    """List the settings under which any key may be new."""
    args = {"rollout.workflow_args", "server.args", "logger.args"}
    args.add("data.chat_template_kwargs")
    return {"data.sources", "cluster.options", *args}


def defined(source: Path) -> set[str]:
    """List the names at the top level of a Python file."""
    names: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def anchors(page: Path) -> set[str]:
    """List the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def present(page: Path) -> str:
    """Return the text without the changelog's sections on what was removed."""
    return re.sub(r"(?ms)^### Removed$.*?(?=^##|\Z)", "", page.read_text())


@pages
def test_every_path_exists(page: Path) -> None:
    for name in PATH.findall(present(page)):
        path, _, test = PLACEHOLDER.sub("*", name).partition("::")
        assert any(ROOT.glob(path)), f"{page.name}: {name}"
        assert not test or test in defined(ROOT / path), f"{page.name}: {name}"


@pages
def test_every_module_and_its_objects_exist(page: Path) -> None:
    for name in MODULE.findall(present(page)):
        module, _, attribute = name.partition(":")
        owner, last = module.rpartition(".")[::2]
        if (ROOT / (module.replace(".", "/"))).is_dir():
            continue
        spec = importlib.util.find_spec(module) if not attribute_of(owner, last) else None
        assert attribute_of(owner, last) or (spec and spec.origin), f"{page.name}: {name}"
        if attribute:
            assert attribute in defined(Path(spec.origin)), f"{page.name}: {name}"


def attribute_of(module: str, name: str) -> bool:
    """Return whether `name` is defined in the file of `module`, or offered by the package."""
    if module == "areal_lite" and name in areal_lite.__all__:
        return True
    source = ROOT / (module.replace(".", "/") + ".py")
    return source.is_file() and name in defined(source)


@pages
def test_every_setting_exists(page: Path) -> None:
    sections = {key.partition(".")[0] for key in known_keys() if "." in key}
    for key in KEY.findall(present(page)):
        if key.partition(".")[0] in sections and not key.endswith(FILES):
            free = any(key.startswith(f"{prefix}.") for prefix in free_keys())
            assert free or key in known_keys(), f"{page.name}: {key}"


@pages
def test_every_command_composes(page: Path) -> None:
    for command, *words in commands(page.read_text()):
        overrides = [word.replace("…", "somewhere") for word in words if word not in ("…", *FLAGS)]
        compose_config(command, parse(command, overrides)[1])


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_settings_of_a_script_compose(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = []

    def train(settings: dict[str, object], on_step: Callable[[dict], object]) -> TrainResult:
        composed.append(compose_config("train", as_overrides(settings)))
        on_step({"step": 1, "reward_mean": 0.5})
        return TrainResult(run_dir=Path("run"), summary={"accuracy_after": 1.0})

    monkeypatch.setattr("areal_lite.train", train, raising=False)
    for language, body in FENCED.findall((ROOT / page).read_text()):
        if language == "python":
            exec(body, {})
    assert len(composed) == 1 and "model" in composed[0]


def test_the_commands_are_found() -> None:
    found = [words for page in PAGES for words in commands(page.read_text())]
    assert len(found) >= 20
    assert {"train", "quickstart", "slurm"} <= {words[0] for words in found}


def test_every_command_is_run_somewhere_or_says_why_not() -> None:
    tables = docs_commands.ELSEWHERE, docs_commands.NOWHERE
    found = [line for page in docs_commands.PAGES for line in docs_commands.commands(page)]
    assert sum(map(docs_commands.runs_here, found)) >= 30
    for table in tables:
        used = {docs_commands.entry(line, tables[0] | tables[1]) for line in found}
        assert set(table) <= used, "an entry that no command needs any more"
    for runner in set(docs_commands.ELSEWHERE.values()):
        assert (ROOT / runner).is_file(), runner


@pytest.mark.parametrize("page", docs_commands.PAGES, ids=lambda page: page.parent.name + page.stem)
def test_a_block_with_a_command_has_nothing_else(page: Path) -> None:
    for language, body in FENCED.findall(page.read_text()):
        lines = [line for line in body.replace("\\\n", " ").splitlines() if not language]
        lines = [line for line in lines if line.strip() and not line.startswith("#")]
        unknown = [line for line in lines if not docs_commands.COMMAND.match(line)]
        assert unknown in ([], lines), f"not a command: {unknown}"


def test_the_commands_of_a_page_are_found_and_made_small(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```\nareal-lite train model=m \\\n    seed=2   # comment\nstep 1: loss\n```\n"
        "```text\npython no.py\n```\n```\n# only a comment\n. .venv/bin/activate\n```\n"
    )
    first, second = docs_commands.commands(page)
    assert (first, second) == ("areal-lite train model=m seed=2", ". .venv/bin/activate")
    small = docs_commands.runnable(first, "", small=True)
    assert small.startswith(first) and "trainer.steps=2" in small
    assert docs_commands.runnable(first, "", small=False) == first
    rest = docs_commands.runnable("areal-lite train … seed=3", "model=m seed=2", small=False)
    assert rest == "areal-lite train model=m seed=2 seed=3"
    assert not docs_commands.runs_here("docker compose up")


def test_the_table_of_rooms_is_in_the_order_of_the_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("| room |")[2].partition("\n## ")[0]
    rows = [re.findall(r"`([\w./]+)`", row)[0] for row in re.findall(r"^\| `.*$", section, re.M)]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    floor = {
        room.strip().removeprefix("areal_lite."): number
        for number, layer in enumerate(layers)
        for room in layer.split("|")
    }
    rooms = [row.removesuffix("/").removesuffix(".py") for row in rows]
    floors = [floor[room] for room in rooms]
    # cli.py and __main__.py share a row.
    assert floors == sorted(floors) and set(floor) - set(rooms) == {"__main__"}
    for row in rows:
        assert (ROOT / "areal_lite" / row).exists()
    starts = re.findall(r"^\| `([\w.]+/?)`.*`([\w.]+)` \|$", section, re.M)
    for room, start in starts:
        folder = ROOT / "areal_lite" / room if room.endswith("/") else ROOT / "areal_lite"
        assert (folder / start).exists(), f"{room}: {start}"


def test_the_glossary_is_in_alphabetical_order() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([a-z][^|]*?) \|", text, re.MULTILINE)[1:]
    assert terms == sorted(terms) and len(terms) > 20


@pytest.mark.parametrize(
    "page, option, folder, left_out",
    [
        ("algorithms.md", "algo", "algo", {"quickstart"}),
        ("running.md", "+experiment", "experiment", set()),
    ],
)
def test_every_shipped_choice_has_a_row(
    page: str, option: str, folder: str, left_out: set[str]
) -> None:
    text = (ROOT / "docs" / page).read_text()
    table = text.partition(f"| `{option}=` |")[2].partition("\n\n")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert rows == {path.stem for path in (ROOT / "conf" / folder).glob("*.yaml")} - left_out
