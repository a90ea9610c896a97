"""Tasks of Harbor (harborframework.com): a shell in a container, and tests that give the reward.

    +task=harbor data.path=tasks data.eval_path=held_out_tasks

Each task is a folder with `instruction.md`, `task.toml`, `environment/Dockerfile` (or the name of a
`docker_image`), and `tests/test.sh`. The tests run after the policy's last answer, and write
`/logs/verifier/reward.txt` or `reward.json`. A Docker Engine builds images and runs containers. A
container ends with its episode, also if the worker is killed: its first process reads from a pipe
that the worker holds.
"""

import asyncio
import hashlib
import json
import math
import secrets
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from areal_lite.config import DataConfig, TrainConfig
from areal_lite.data.prompts import Row, Split, TextPrompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rollout.episode import Episode
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.tools import Tools, ToolsLost

_MAX_OUTPUT_BYTES = 1 << 16
_ENGINE_S = 60.0  # for what the engine itself does
_MAX_PROCESSES = 1024
_REWARDS = "cat /logs/verifier/reward.txt 2> /dev/null || cat /logs/verifier/reward.json"
_SHELL = {
    "name": "bash",
    "description": "Runs a command in a new shell and returns its output. Files stay.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "the command"}},
        "required": ["command"],
    },
}


class Task:
    """The folder of a task. Raises ValueError if it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.settings = tomllib.loads((folder / "task.toml").read_text())
            self.instruction = (folder / "instruction.md").read_text()
        except OSError as error:
            raise ValueError(f"{folder}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{folder}/task.toml: {error}") from error
        self.machine: dict[str, Any] = self.settings.get("environment", {})
        if not (folder / "tests" / "test.sh").is_file():
            raise ValueError(f"{folder} has no tests/test.sh, which would give the reward")
        self._made: str | None = self.machine.get("docker_image")  # an image that is not built here
        if not (self._made or (folder / "environment" / "Dockerfile").is_file()):
            raise ValueError(f"{folder} has neither environment/Dockerfile nor a docker_image")
        for unknown in {"steps"} & self.settings.keys() | {"gpus"} & self.machine.keys():
            raise ValueError(f"{folder}/task.toml: {unknown} is not supported")

    @cached_property
    def image(self) -> str:
        """Return the name of its image. One that is built is named by the content of its files."""
        if self._made:
            return self._made
        digest = hashlib.sha256()
        for path in sorted(p for p in (self.folder / "environment").rglob("*") if p.is_file()):
            digest.update(f"{path.relative_to(self.folder)}\0".encode() + path.read_bytes())
        return f"areal-lite-task:{digest.hexdigest()[:24]}"

    async def build(self) -> None:
        """Build the image, if the engine does not have it. Raises RuntimeError if that fails."""
        if self._made or not (await _docker("image", "inspect", self.image))[0]:
            return
        limit_s = float(self.machine.get("build_timeout_sec", 600))
        words = ("build", "-q", "-t", self.image, str(self.folder / "environment"))
        code, output = await _docker(*words, limit_s=limit_s)
        if code:
            raise RuntimeError(f"{self.folder}: its image cannot be built: {output[-2000:]}")

    def limits(self, internet: bool) -> list[str]:
        """Return the options of a container. `internet`: whether the run lets it reach networks."""
        memory = self.machine.get("memory") or f"{self.machine.get('memory_mb', 2048)}m"
        options = [f"--cpus={self.machine.get('cpus', 1)}", f"--memory={memory}"]
        options += [f"--pids-limit={_MAX_PROCESSES}", "--security-opt=no-new-privileges"]
        allowed = internet and self.machine.get("allow_internet", True)
        return options if allowed else [*options, "--network=none"]


def problems(config: DataConfig, tokenizer: Tokenizer, split: Split) -> TextPrompts:
    """Open the tasks in the folder `data.path` or `data.eval_path`. Raises ValueError."""
    key = "path" if split == "train" else "eval_path"
    folder = getattr(config, key) or "null"
    rows = list(_rows(Path(folder).absolute(), config.prompt_key))
    if not rows:
        raise ValueError(f"data.{key}={folder}: there is no folder with a task.toml in it")
    return TextPrompts(iter(rows), replace(config, answer_key=""), tokenizer)


def _rows(folder: Path, key: str) -> Iterator[Row]:
    for file in sorted(folder.glob("*/task.toml")):
        yield file.parent.name, {key: Task(file.parent).instruction, "task": str(file.parent)}


class Terminal(Tools):
    """A conversation between the policy and the container of its task.

    Args:
        internet: whether containers reach networks, if their task allows it. The policy's
            commands then do, too.
        command_timeout_s: how long a command may take.
        max_turns, max_characters, tool_parser: as of `Tools`.
    """

    def __init__(
        self,
        internet: bool = False,
        command_timeout_s: float = 60.0,
        max_turns: int = 30,
        **settings: Any,
    ) -> None:
        super().__init__((), max_turns=max_turns, **settings)
        self._internet, self._limit_s = internet, command_timeout_s
        self._schemas = [{"type": "function", "function": _SHELL}]

    async def start(self, config: TrainConfig) -> None:
        """Ask the engine for its version. Raises ValueError if none answers."""
        code, said = await _docker("version", "--format", "{{.Server.Version}}")
        if code:
            raise ValueError(f"Harbor's tasks need an engine of Docker: {said.strip()}")

    async def __call__(self, episode: Episode) -> Trajectory:
        task = Task(Path(episode.prompt.info["task"]))
        await task.build()
        async with _container(task, self._internet) as name:
            trajectory = await self.play(episode, {"bash": partial(_bash, name, self._limit_s)})
            trajectory.reward = await _test(name, task)
        return trajectory


@asynccontextmanager
async def _container(task: Task, internet: bool) -> AsyncIterator[str]:
    """Run a container of a task, and yield its name. Raises ToolsLost if it does not start."""
    name = f"areal-lite-{secrets.token_hex(8)}"
    words = ["run", "-i", "--rm", "--init", f"--name={name}", *task.limits(internet)]
    words += ["--entrypoint=sh", task.image, "-c", "echo ready; exec cat"]
    process = await _start(*words, stdin=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        limit_s = float(task.machine.get("build_timeout_sec", 600))  # it may be pulled now
        try:
            said = await asyncio.wait_for(process.stdout.readline(), limit_s)
        except TimeoutError:
            said = b"it takes too long"
        if said != b"ready\n":
            raise ToolsLost(f"{task.folder}: its container does not start: {said.decode()}")
        yield name
    finally:
        with suppress(ToolsLost):
            await _docker("rm", "-f", name)
        await _end(process)


async def _bash(container: str, limit_s: float, command: str) -> str:
    """Run a command of the policy and return its output. Raises ToolsLost without a container."""
    words = ("timeout", "-k", "1", f"{limit_s:g}", "bash", "-c", command)
    code, output = await _docker("exec", container, *words, limit_s=limit_s + _ENGINE_S)
    if code == 124:
        return f"{output}\nerror: no end within {limit_s:g} s"
    return f"{output}\nexit status {code}" if code else output


async def _test(container: str, task: Task) -> float:
    """Run the tests of a task and return their reward. Raises RuntimeError if they give none."""
    settings = task.settings.get("verifier", {})
    # The user of the image may not be root, and writes the reward.
    fresh = "rm -rf /tests /logs/verifier && mkdir -p -m 777 /tests /logs/verifier"
    for words in (
        ("exec", "-u", "0", container, "sh", "-c", fresh),
        ("cp", f"{task.folder / 'tests'}/.", f"{container}:/tests"),
    ):
        code, said = await _docker(*words)
        if code:  # a reward that the policy wrote must not count
            raise RuntimeError(f"{task.folder}: its tests cannot be copied: {said.strip()}")
    environment = [f"--env={name}={value}" for name, value in settings.get("env", {}).items()]
    words = ("exec", *environment, container, "bash", "/tests/test.sh")
    _, output = await _docker(*words, limit_s=float(settings.get("timeout_sec", 600)))
    _, said = await _docker("exec", container, "sh", "-c", _REWARDS)
    if (reward := _reward(said)) is None:
        raise RuntimeError(f"{task.folder}: tests/test.sh wrote no reward: {output[-2000:]}")
    return reward


def _reward(text: str) -> float | None:
    """Return the number in `text`, or the reward in an object, alone or by that name, if any."""
    try:
        given = json.loads(text)
        if isinstance(given, dict):
            (given,) = [given["reward"]] if "reward" in given else given.values()
        reward = float(given)
    except (TypeError, ValueError):
        return None
    return reward if math.isfinite(reward) else None


async def _docker(*words: str, limit_s: float = _ENGINE_S) -> tuple[int, str]:
    """Run `docker` and return its status and the beginning of what it said.

    Raises ToolsLost if it does not end within `limit_s`.
    """
    process = await _start(*words)
    try:
        async with asyncio.timeout(limit_s):
            output = await _beginning(process)
            return await process.wait(), output.decode(errors="replace")
    except TimeoutError as error:
        raise ToolsLost(f"docker {' '.join(words[:2])}: no end within {limit_s:g} s") from error
    finally:
        await _end(process)


async def _start(
    *words: str, stdin: int = asyncio.subprocess.DEVNULL
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            "docker",
            *words,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except FileNotFoundError:
        raise ValueError("Harbor's tasks need the program docker: install it") from None


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _beginning(process: asyncio.subprocess.Process) -> bytes:
    """Return the first output of a process, whatever it says after it."""
    assert process.stdout is not None
    kept = b""
    while part := await process.stdout.read(_MAX_OUTPUT_BYTES):
        kept += part[: _MAX_OUTPUT_BYTES - len(kept)]
    return kept
