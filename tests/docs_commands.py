"""Run the commands of the documentation as a reader would, each page in a folder of its own.

    python tests/docs_commands.py                  run all pages
    python tests/docs_commands.py docs/python.md   run some pages
    python tests/docs_commands.py --list           who runs each command, and which never run

A command is a line of a code block without a language. The Python files that a page shows are
written first. The models that a page names are a tiny random one, its data sets a few rows, and its
runs two small steps, except on pages that choose small runs themselves. `…` is the rest of a
command: the words of the page's earlier command, or of a small one.

tests/unit/test_docs.py checks that every command has an entry here or can be run by this script.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.tools.report.recorded_run import unpack  # noqa: E402

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
# The beginning of a command, and the test or script that runs it.
ELSEWHERE = {
    "bash examples/quickstart.sh": "tests/integration/test_quickstart.py",
    "bash examples/": "tests/integration/test_examples.py",
    "bash tests/run.sh": ".ci/run",
    "bash tests/lint.sh": ".ci/run",
    "python -m pytest tests/unit": "tests/run.sh",
    "areal-lite export": "tests/ranks/test_export.py",
    "areal-lite serve": "tests/integration/test_serve.py",
    "areal-lite servers": "tests/integration/test_servers_command.py",
    "areal-lite train model=models/Qwen3-30B-A3B": "tests/integration/test_routing_replay.py",
    "areal-lite train … rollout.workflow=areal_lite.environments.mcp": (
        "tests/unit/environments/test_mcp.py"
    ),
    "areal-lite slurm +": "tests/integration/test_slurm.py",
    "python -m areal_lite.launch.server_pool": "tests/integration/test_slurm.py",
    "python -m areal_lite.controller.service": "tests/integration/test_slurm.py",
    "python -m torch.distributed.run": "tests/integration/test_slurm.py",
    "python -m areal_lite.launch.prepare end": "tests/integration/test_slurm.py",
    "python -m areal_lite.clusters": "tests/integration/test_joined.py",
    "export AREAL_LITE_KEY": "tests/integration/test_joined.py",
    "docker compose": "tests/integration/test_compose.py",
    "cp .env.example .env": "tests/integration/test_compose.py",
}
# The beginning of a command that nothing runs, and the reason.
NOWHERE = {
    "apt-get install": "it changes the system",
    ". .venv/bin/activate && pre-commit install": "it changes the hooks of the checkout",
    "docker compose --profile monitor": "it needs the images of Prometheus and Grafana",
    "hf download": "it downloads a model",
    'areal-lite train --dry-run "+experiment=[gsm8k,one_gpu]"': "it needs a GPU",
    "bash examples/slurm/small.sh": "it needs a Slurm cluster of two nodes",
    "bash examples/slurm/areal.sh": "it needs a Slurm cluster with GPUs",
    "areal-lite train … rollout.workflow=module:name": "it is the pattern of those below it",
}
# How a line of a code block begins that is a command.
COMMAND = re.compile(r"(areal-lite|python|bash|docker|hf|apt-get|cp|echo|export|\.) |run_dir=\$\(")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Pages that choose small settings themselves.
SMALL_PAGES = ("docs/first-run.md", "docs/python.md")
SMALL = [
    "trainer.steps=2",
    "trainer.batch_groups=2",
    "trainer.data_parallel=1",
    "trainer.save_every=0",
    "rollout.group_size=2",
    "rollout.max_new_tokens=8",
    "server.count=1",
    "eval.problems=2",
    "eval.every=0",
]
# A template without tools is refused where a workflow has some.
NAMES_OF_TOOLS = "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
REST = "model=models/tiny data.source=jsonl data.path=train.jsonl data.eval_path=test.jsonl"
REST += " reward.function=areal_lite.rewards.exact:exact_reward"
MODELS = (
    "models/Qwen2.5-1.5B-Instruct",
    "models/Qwen2.5-7B",
    "models/Qwen3-0.6B",
    "models/Qwen3-8B",
)
TINY = "num_layers=2 hidden_size=64 num_heads=4 num_kv_heads=4 head_dim=16 mlp_size=128"
FOLLOWS_S = 20


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page, each on one line and without its comment."""
    for language, body in BLOCK.findall(page.read_text()):
        for line in body.replace("\\\n", " ").splitlines() if not language else ():
            command = re.sub(r"(^|\s+)#.*", "", " ".join(line.split()))
            if COMMAND.match(command):
                yield command


def entry(command: str, table: dict[str, str]) -> str | None:
    """Return the longest beginning of `command` that has an entry in `table`."""
    return max((start for start in table if command.startswith(start)), key=len, default=None)


def runs_here(command: str) -> bool:
    """Return whether this script runs a command."""
    return entry(command, ELSEWHERE | NOWHERE) is None


def runnable(command: str, before: str, small: bool) -> str:
    """Write a command such that it takes a minute at most.

    Args:
        command: as the page has it.
        before: the page's earlier training command, for `…`.
        small: whether to append small settings.
    """
    command = command.replace("…", before or REST)
    starts = re.search(r"areal-lite train (?!--(?!prepare))", command)
    if starts and small:
        settings = " ".join(SMALL)
        command = (
            command.replace(")", f" {settings})") if ")" in command else f"{command} {settings}"
        )
    if "--follow" in command:  # it serves until it is interrupted
        return f"timeout --signal=INT {FOLLOWS_S} {command} || [ $? = 124 ]"
    return command


def run_page(page: Path, folder: Path) -> int:
    """Run the commands of a page in `folder` and return their number. Raises CalledProcessError."""
    prepare(page, folder)
    before, count = "", 0
    small = str(page.relative_to(ROOT)) not in SMALL_PAGES
    for command in filter(runs_here, commands(page)):
        line = runnable(command, before, small)
        print(f"{page.relative_to(ROOT)}: {line}", file=sys.stderr, flush=True)
        shell(line, folder)
        count += 1
        if command.startswith("areal-lite train") and not re.search("…|--help", command):
            before = line.removeprefix("areal-lite train ").replace("--dry-run ", "")
    return count


def prepare(page: Path, folder: Path) -> None:
    """Write what the page names: models, data, Python files and a run.

    What all pages need is made once, beside their folders.
    """
    common = folder.parent / "common"
    if not common.exists():
        common.mkdir(parents=True)
        write_python_files(ROOT / "docs" / "first-run.md", common)
        shell(f"python -m areal_lite_quickstart.make_model out=tiny {TINY}", common)
        template = common / "tiny" / "chat_template.jinja"
        template.write_text(NAMES_OF_TOOLS + template.read_text())
        shell("python my_data.py", common)
        unpack("async", common / "runs").rename(common / "runs" / "NAME")
    shutil.copytree(common, folder, symlinks=True)
    (folder / "models").mkdir()
    if "python -m areal_lite_quickstart.make_model out=models/tiny" not in commands(page):
        (folder / "tiny").rename(folder / "models" / "tiny")
    for model in MODELS:
        (folder / model).parent.mkdir(parents=True, exist_ok=True)
        (folder / model).symlink_to(folder / "models" / "tiny")
    write_python_files(page, folder)
    data_set = folder / "openai" / "gsm8k" / "main"
    data_set.mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(folder / name, data_set)


def write_python_files(page: Path, folder: Path) -> None:
    """Write the Python blocks of a page whose first line is a comment with a file name."""
    for language, body in BLOCK.findall(page.read_text()):
        if language == "python" and (name := re.match(r"# (\w+\.py)\b", body)):
            (folder / name[1]).write_text(body)


def shell(command: str, folder: Path) -> None:
    """Run a command of the project in `folder`. Raises CalledProcessError."""
    programs = folder.parent / "bin"
    if not programs.exists():  # where the package is not installed, it is still this checkout
        programs.mkdir()
        # A link to the interpreter would not find the packages of its virtual environment.
        for name, module in ("python", ""), ("areal-lite", "-m areal_lite"):
            script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n'
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=True,
    )


def show() -> None:
    """Print every command and who runs it."""
    for page in PAGES:
        for command in commands(page):
            if start := entry(command, NOWHERE):
                who = f"nothing: {NOWHERE[start]}"
            else:
                start = entry(command, ELSEWHERE)
                who = ELSEWHERE[start] if start else "tests/docs_commands.py"
            print(f"{page.relative_to(ROOT)}: {command[:70]}\n    {who}")


def main() -> int:
    """Run the pages that are named, or all."""
    if sys.argv[1:] == ["--list"]:
        show()
        return 0
    pages = [ROOT / name for name in sys.argv[1:]] or PAGES
    with tempfile.TemporaryDirectory() as folder:
        for number, page in enumerate(pages):
            if any(map(runs_here, commands(page))):
                run_page(page, Path(folder, str(number)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
