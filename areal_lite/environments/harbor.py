"""Tasks of Harbor (harborframework.com): a shell in a container, and tests that give the reward.

    +task=harbor data.path=tasks data.eval_path=held_out_tasks

docs/workflows.md (What to use) says what a task has. A Docker Engine builds images and runs
containers. A container ends with its episode, also if the worker is killed: its first process reads
from a pipe that the worker holds.
"""

import asyncio
import hashlib
import json
import math
import secrets
import tomllib
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from areal_lite.config import DataConfig, TrainConfig
from areal_lite.data.prompts import Split, TextPrompts
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.tools import Tools, ToolsLost

_MAX_OUTPUT_BYTES = 1 << 16
_ENGINE_S = 60.0  # for what the engine itself does
_TASK_S = 600.0  # for what the task does, unless it says how long
_MAX_PROCESSES = 1024
_REWARDS = "cat /logs/verifier/reward.txt 2> /dev/null || cat /logs/verifier/reward.json"
_CLEAR = "rm -rf /tests /logs/verifier"
_SHELL = {
    "name": "bash",
    "description": "Runs a command in a new shell and returns its output. Files stay.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "the command"}},
        "required": ["command"],
    },
}


@dataclass(frozen=True)
class Step:
    """A step of a task, or all of a task without steps. The settings are of its `task.toml`."""

    instruction: str
    workdir: Path  # files for the container, if there are any
    tests: list[Path]  # folders, each laid over the one before
    agent: dict[str, Any]
    verifier: dict[str, Any]
    least: dict[str, float]  # by name of the reward

    def is_missed(self, rewards: dict[str, float]) -> bool:
        """Return whether a reward is below its least one, which ends the task."""
        return any(rewards.get(name, -math.inf) < least for name, least in self.least.items())


class Task:
    """The folder of a task. Raises ValueError if it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.settings = tomllib.loads(_text(folder / "task.toml"))
            self.machine: dict[str, Any] = self.settings.get("environment", {})
            self.steps = [self._step(about) for about in self.settings.get("steps") or [{}]]
        except OSError as error:
            raise ValueError(f"{folder}: {error}") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}/task.toml: {error}") from error
        self.strategy: str = self.settings.get("multi_step_reward_strategy", "mean")
        if self.strategy not in ("mean", "final"):
            raise ValueError(f"{folder}: multi_step_reward_strategy={self.strategy} is unknown")
        if (folder / "environment" / "docker-compose.yaml").is_file():
            raise ValueError(f"{folder}: environment/docker-compose.yaml is not supported")
        self._made: str | None = self.machine.get("docker_image")  # an image that is not built here
        if not (self._made or (folder / "environment" / "Dockerfile").is_file()):
            raise ValueError(f"{folder} has neither environment/Dockerfile nor a docker_image")

    def _step(self, about: dict[str, Any]) -> Step:
        """Return the step of an entry in `steps`; {} stands for a task without steps."""
        own = self.folder / "steps" / str(about.get("name"))
        folder = own if about else self.folder
        agent, verifier = (_merged(self.settings, about, key) for key in ("agent", "verifier"))
        for unknown in ("gpus", "healthcheck", "mcp_servers"):
            if self.machine.get(unknown) or about.get(unknown):
                raise ValueError(f"{unknown} is not supported")
        if verifier.get("environment_mode", "shared") != "shared":
            raise ValueError("tests in an environment of their own are not supported")
        tests = [path for path in (self.folder / "tests", own / "tests") if path.is_dir()]
        if not any((path / "test.sh").is_file() for path in tests):
            raise ValueError(f"{folder.name} has no tests/test.sh, which would give the reward")
        least = about.get("min_reward", {})
        least = least if isinstance(least, dict) else {"reward": least}
        instruction = _text(folder / "instruction.md")
        return Step(instruction, own / "workdir", tests, agent, verifier, least)

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
        limit_s = float(self.machine.get("build_timeout_sec", _TASK_S))
        words = ("build", "-q", "-t", self.image, str(self.folder / "environment"))
        code, output = await _docker(*words, limit_s=limit_s)
        if code:
            raise RuntimeError(f"{self.folder}: its image cannot be built: {output[-2000:]}")

    def limits(self, internet: bool) -> list[str]:
        """Return the options of a container. `internet`: whether the run lets it reach networks."""
        memory = self.machine.get("memory") or f"{self.machine.get('memory_mb', 2048)}m"
        options = [f"--cpus={self.machine.get('cpus', 1)}", f"--memory={memory}"]
        options += _variables(self.machine.get("env", {}))
        options += [f"--pids-limit={_MAX_PROCESSES}", "--security-opt=no-new-privileges"]
        allowed = internet and self.machine.get("allow_internet", True)
        return options if allowed else [*options, "--network=none"]


def _text(path: Path) -> str:
    """Read a text. Raises OSError, also if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(f"{path}: {error}") from None


def _merged(task: dict[str, Any], step: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the settings `key` of a step, or of the task where the step has none."""
    settings, over = task.get(key, {}), step.get(key, {})
    return settings | over | {"env": settings.get("env", {}) | over.get("env", {})}


def problems(config: DataConfig, tokenizer: Tokenizer, split: Split) -> TextPrompts:
    """Open the tasks in the folder `data.path` or `data.eval_path`. Raises ValueError."""
    key = "path" if split == "train" else "eval_path"
    folder = getattr(config, key) or "null"
    tasks = [Task(file.parent) for file in sorted(Path(folder).absolute().glob("*/task.toml"))]
    if not tasks:
        raise ValueError(f"data.{key}={folder}: there is no folder with a task.toml in it")
    asked = config.prompt_key
    rows = ((t.folder.name, {asked: t.steps[0].instruction, "task": str(t.folder)}) for t in tasks)
    return TextPrompts(rows, replace(config, answer_key=""), tokenizer)


class Terminal(Tools):
    """A conversation between the policy and the container of its task.

    Args:
        internet: whether containers reach networks, if their task allows it. The policy's
            commands then do, too.
        command_timeout_s: how long a command may take.
        max_turns: answers of the policy after which a step ends.
        max_characters, tool_parser: as of `Tools`.
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
        transcript = self.transcript(episode)
        async with _container(task, self._internet) as name:
            rewards = await self._rewards(transcript, task, name)
        reward = rewards[-1] if task.strategy == "final" else sum(rewards) / len(rewards)
        return transcript.trajectory(reward)

    async def _rewards(self, transcript: Transcript, task: Task, container: str) -> list[float]:
        """Play the steps of a task and return the reward of each one until the task ends.

        A conversation that has no tokens left for more steps earns nothing with them.
        """
        rewards: list[float] = []
        for step in task.steps:
            await _prepare(container, step)
            shell = partial(_bash, container, step, self._limit_s)
            await self.converse(transcript, {"bash": shell})
            earned = await _test(container, step)
            rewards.append(earned["reward"])
            rest = task.steps[len(rewards) :]
            if not rest or step.is_missed(earned):
                break
            if task.strategy == "mean":
                transcript.credit(rewards[-1] / len(task.steps))
            told = {"role": "user", "content": rest[0].instruction}
            if transcript.finish_reason == "length" or not transcript.add_messages([told]):
                return rewards + [0.0] * len(rest)
        return rewards


@asynccontextmanager
async def _container(task: Task, internet: bool) -> AsyncIterator[str]:
    """Run a container of a task, and yield its name. Raises ToolsLost if it does not start."""
    name = f"areal-lite-{secrets.token_hex(8)}"
    words = ["run", "-i", "--rm", "--init", f"--name={name}", *task.limits(internet)]
    words += ["--entrypoint=sh", task.image, "-c", "echo ready; exec cat"]
    process = await _start(*words, stdin=PIPE)
    assert process.stdout is not None
    try:
        said, line = b"", b"-"
        try:
            async with asyncio.timeout(float(task.machine.get("build_timeout_sec", _TASK_S))):
                # Docker may warn first, and say that it pulls the image.
                while line and line != b"ready\n":
                    line = await process.stdout.readline()
                    said += line
        except TimeoutError:
            said += b"it takes too long"
        if line != b"ready\n":
            reason = said[-2000:].decode(errors="replace")
            raise ToolsLost(f"{task.folder}: its container does not start: {reason}")
        yield name
    finally:
        with suppress(ToolsLost):
            await _docker("rm", "-f", name)
        await _end(process)


async def _prepare(container: str, step: Step) -> None:
    """Give a container the files of a step, and run their `setup.sh`. Raises RuntimeError."""
    if not step.workdir.is_dir():
        return
    user = _user(step.agent)
    place = await _done("exec", *user, container, "sh", "-c", "pwd")
    await _done("cp", f"{step.workdir}/.", f"{container}:{place.strip()}")
    if (step.workdir / "setup.sh").is_file():
        await _done("exec", *user, container, "bash", "setup.sh", limit_s=_TASK_S)


async def _bash(container: str, step: Step, limit_s: float, command: str) -> str:
    """Run a command of the policy and return its output. Raises ToolsLost without a container."""
    words = (container, "timeout", "-k", "1", f"{limit_s:g}", "bash", "-c", command)
    code, output = await _docker("exec", *_user(step.agent), *words, limit_s=limit_s + _ENGINE_S)
    if code == 124:
        return f"{output}\nerror: no end within {limit_s:g} s"
    return f"{output}\nexit status {code}" if code else output


async def _test(container: str, step: Step) -> dict[str, float]:
    """Run the tests of a step and return its rewards. Raises RuntimeError if they give none."""
    settings = step.verifier
    # The user of the image may not be root, and writes the reward.
    fresh = f"{_CLEAR} && mkdir -p -m 777 /tests /logs/verifier"
    # If this fails, a reward that the policy wrote must not count.
    await _done("exec", "-u", "0", container, "sh", "-c", fresh)
    for folder in step.tests:
        await _done("cp", f"{folder}/.", f"{container}:/tests")
    words = (*_user(settings), *_variables(settings["env"]), container, "bash", "/tests/test.sh")
    _, output = await _docker("exec", *words, limit_s=float(settings.get("timeout_sec", _TASK_S)))
    # The policy does not see the tests in its next step.
    _, said = await _docker("exec", "-u", "0", container, "sh", "-c", f"{_REWARDS}; {_CLEAR}")
    if not (rewards := _parsed(said)):
        raise RuntimeError(f"{step.tests[-1]}/test.sh wrote no reward: {output[-2000:]}")
    return rewards


def _variables(values: dict[str, Any]) -> list[str]:
    return [f"--env={name}={value}" for name, value in values.items()]


def _user(settings: dict[str, Any]) -> list[str]:
    return [f"--user={settings['user']}"] if "user" in settings else []


def _parsed(text: str) -> dict[str, float]:
    """Return rewards by name, among them `reward`; {} if `text` does not give it.

    It is the number in `text`, or what an object has by this name or alone.
    """
    try:
        given = json.loads(text)
        given = given if isinstance(given, dict) else {"reward": given}
        rewards = {name: float(value) for name, value in given.items()}
    except (TypeError, ValueError):
        return {}
    if len(rewards) == 1:
        rewards["reward"] = sum(rewards.values())
    return rewards if "reward" in rewards and all(map(math.isfinite, rewards.values())) else {}


async def _done(*words: str, limit_s: float = _ENGINE_S) -> str:
    """Run `docker` and return what it said. Raises RuntimeError if it failed."""
    code, said = await _docker(*words, limit_s=limit_s)
    if code:
        raise RuntimeError(f"docker {' '.join(words)}: {said[-2000:].strip()}")
    return said


async def _docker(*words: str, limit_s: float = _ENGINE_S) -> tuple[int, str]:
    """Run `docker` and return its status and the beginning of what it said.

    Raises ToolsLost if it does not end within `limit_s`.
    """
    process, output = await _start(*words), b""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(limit_s):
            while part := await process.stdout.read(_MAX_OUTPUT_BYTES):
                output += part[: _MAX_OUTPUT_BYTES - len(output)]
            return await process.wait(), output.decode(errors="replace")
    except TimeoutError as error:
        raise ToolsLost(f"docker {' '.join(words[:2])}: no end within {limit_s:g} s") from error
    finally:
        await _end(process)


async def _start(*words: str, stdin: int = DEVNULL) -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            "docker", *words, stdin=stdin, stdout=PIPE, stderr=STDOUT
        )
    except FileNotFoundError:
        raise ValueError("Harbor's tasks need the program docker: install it") from None


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
