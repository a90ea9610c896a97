"""examples/setup.sh with stand-ins for pip and uv that write down what they are asked for."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each line that a stand-in writes is the name of its program and its arguments.
STAND_IN = """#!/bin/sh
echo {name} "$@" >> {log}
{then}
"""
# All that the PATH has besides: a uv or a GPU of this machine must not be found.
TOOLS = ("cat", "cksum", "cut", "rm", "touch")
INDEX = "https://torch.example/cpu"
# `python3 -c` asks whether the index of CPU builds answers.
INDEX_ANSWERS = "exit 0"
INDEX_IS_SILENT = '[ "$1" != -c ]'
TORCH = f"pip --no-deps --index-url {INDEX} torch==2.13.0"
PACKAGES = "-c {root}/constraints.txt -e {root}[{extras}]"
SGLANG = "--no-deps sglang==0.5.21 xgrammar==0.2.7"


class Machine:
    """A checkout whose virtual environment has stand-ins, and a PATH without the real programs."""

    def __init__(self, folder: Path) -> None:
        self.root, self.path, self.log = folder / "checkout", folder / "bin", folder / "log"
        self.environment: dict[str, str] = {}
        self.path.mkdir()
        programs = self.root / ".venv" / "bin"
        programs.mkdir(parents=True)
        for name in ("pyproject.toml", "constraints.txt"):
            (self.root / name).write_text((ROOT / name).read_text())
        (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
        self.put("python3", INDEX_ANSWERS, programs)
        (programs / "python").symlink_to("python3")
        self.put("nvidia-smi", "exit 1")
        for name in ("bash", *TOOLS):
            (self.path / name).symlink_to(shutil.which(name) or name)

    def put(self, name: str, then: str = "exit 0", folder: Path | None = None) -> None:
        """Put a program on the PATH that writes down its arguments and then does `then`."""
        program = (folder or self.path) / name
        program.write_text(STAND_IN.format(name=name, log=self.log, then=then))
        program.chmod(0o755)

    def python(self, then: str) -> None:
        """Let the environment's Python do `then`."""
        self.put("python3", then, self.root / ".venv" / "bin")

    def set_up(self, *extra: str, status: int = 0) -> tuple[list[str], str]:
        """Run the setup; return what it installed, one line each, and what it said."""
        self.log.write_text("")
        command = f'. {ROOT}/examples/setup.sh; areal_lite_setup "$@"'
        done = subprocess.run(
            [str(self.path / "bash"), "-c", command, "bash", str(self.root), *extra],
            env={"PATH": str(self.path), "AREAL_LITE_TORCH_INDEX": INDEX, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == status, done.stderr
        pip = "python3 -m pip install -qq --disable-pip-version-check "
        lines = [line.replace(pip, "pip ") for line in self.log.read_text().splitlines()]
        lines = [line.replace("uv pip install --quiet ", "uv ") for line in lines]
        return [line for line in lines if line.split()[0] in ("pip", "uv")], done.stderr

    def packages(self, extras: str) -> str:
        return PACKAGES.format(root=self.root, extras=extras)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_pip_installs_where_there_is_no_uv(machine: Machine) -> None:
    installed, said = machine.set_up()
    assert installed == [TORCH, f"pip {machine.packages('cpu')}", f"pip {SGLANG}"]
    assert said.splitlines() == [
        "setup: installing for CPUs: 0.4 GB to download, 1.8 GB on disk, a few minutes",
        "setup: 1/3 torch",
        "setup: 2/3 areal_lite and what it needs",
        "setup: 3/3 SGLang",
    ]


def test_uv_installs_where_it_is_on_the_path(machine: Machine) -> None:
    machine.put("uv")
    installed, _ = machine.set_up("test")
    assert installed == [TORCH, f"uv {machine.packages('cpu,test')}", f"uv {SGLANG}"]


def test_pip_installs_what_uv_cannot(machine: Machine) -> None:
    machine.put("uv", "exit 2")
    installed, said = machine.set_up()
    packages = machine.packages("cpu")
    assert installed == [
        TORCH,
        *(f"{tool} {words}" for words in (packages, SGLANG) for tool in ("uv", "pip")),
    ]
    assert said.count("setup: uv failed; trying pip") == 2


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_machine_with_gpus_gets_torch_as_it_is_on_pypi(machine: Machine, tool: str) -> None:
    machine.put("nvidia-smi")
    if tool == "uv":
        machine.put("uv")
    installed, said = machine.set_up("test")
    assert installed == [f"{tool} -e {machine.root}[gpu,test]"]
    assert said.startswith("setup: installing for GPUs: about 5 GB")


def test_the_size_is_said_before_where_no_index_of_cpu_builds_answers(machine: Machine) -> None:
    machine.python(INDEX_IS_SILENT)
    installed, said = machine.set_up()
    assert installed[0] == "pip torch==2.13.0" and len(installed) == 3
    assert said.startswith(f"setup: {INDEX} does not answer") and " GB to download" in said


MAKES_VENV = """case "$*" in "-m venv "*) echo "PATH=$3/bin:$PATH" > "$3/bin/activate";; esac"""


def test_an_environment_that_was_cut_short_is_made_again(machine: Machine) -> None:
    (machine.root / ".venv/bin/activate").unlink()
    machine.put("python3", MAKES_VENV)
    installed, said = machine.set_up()
    assert len(installed) == 3 and said.startswith(f"setup: making {machine.root}/.venv")


def test_the_path_of_the_interpreter_may_have_spaces(machine: Machine, tmp_path: Path) -> None:
    (machine.root / ".venv/bin/activate").unlink()
    (own := tmp_path / "my tools").mkdir()
    machine.put("python3", MAKES_VENV, own)
    machine.environment["PYTHON"] = str(own / "python3")
    assert len(machine.set_up()[0]) == 3


def test_nothing_is_installed_twice(machine: Machine) -> None:
    assert machine.set_up("test")[0]
    assert machine.set_up("test") == ([], "") == machine.set_up()
    with (machine.root / "constraints.txt").open("a") as file:
        file.write("another==1\n")
    assert machine.set_up()[0] and machine.set_up()[0] == []
    assert machine.set_up("test")[0], "the tests need more"


@pytest.mark.parametrize("fails", ["torch==", "-e ", "sglang=="])
def test_a_failure_is_not_taken_for_an_installation(machine: Machine, fails: str) -> None:
    machine.python(f'case "$*" in *"{fails}"*) exit 1;; esac')
    installed, _ = machine.set_up(status=1)
    assert fails in installed[-1], "nothing is installed after a failure"
    machine.python(INDEX_ANSWERS)
    assert len(machine.set_up()[0]) == 3


def test_the_readme_installs_a_wheel_with_the_same_versions() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"pip install {SGLANG}\n" in readme and f"pip install {TORCH.split()[-1]} " in readme
