"""Tasks of Harbor: folders that are refused, and episodes in containers of a real engine."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_lite.config import DataConfig, TrainConfig
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.environments import harbor
from areal_lite.environments.harbor import Task, Terminal, problems
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.tools import ToolsLost
from tests.unit.rollout.episodes import chat_prompt, playing, save_chat_tokenizer

TESTS = """#!/bin/bash
if grep -q "^bye" /app/a.txt; then echo 1 > /logs/verifier/reward.txt
elif [ -n "$HALF" ]; then echo '{"reward": 0.5, "style": 0.1}' > /logs/verifier/reward.json
else echo 0 > /logs/verifier/reward.txt; fi
"""
TOML = """schema_version = "1.1"
[verifier]
timeout_sec = 30.0
env = { HALF = "yes" }
[environment]
cpus = 1
memory_mb = 256
"""
# What the engine has instead of a base image: files of this machine, in a container without any.
ROOTFS = "bash sh cat timeout sed grep mkdir rm sleep ls seq touch".split()


def make_task(folder: Path, **files: str | None) -> Path:
    """Write a task whose file `a.txt` says hello. `files` replace some by name; None: no file."""
    content: dict[str, str | None] = {
        "instruction.md": "Write bye into a.txt.",
        "task.toml": TOML,
        "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\nRUN echo hello > a.txt\n",
        "tests/test.sh": TESTS,
    }
    for name, text in (content | files).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


BASE = "areal-lite-test-base:1"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> None:
    """Skip without an engine, and give it an image of programs of this machine."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    if subprocess.run(["docker", "version"], capture_output=True).returncode:
        pytest.skip("no Docker Engine answers")
    root = tmp_path_factory.mktemp("root")
    (root / "bin").mkdir(), (root / "tmp").mkdir()
    for program in ROOTFS:
        path = Path(shutil.which(program) or "")
        shutil.copy(path, root / "bin" / program)
        listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
        for library in (word for word in listed.split() if word.startswith("/")):
            target = root / library[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    archive = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["docker", "import", "-", BASE], stdin=archive.stdout, check=True)


def bash(command: str) -> str:
    call = {"name": "bash", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def play(tokenizer: Tokenizer, folder: Path, *script: list[str], **settings) -> list[Trajectory]:
    """Play an episode of the task for each script, at the same time."""
    terminal = Terminal(**settings)
    prompt = chat_prompt(tokenizer, "Do it.")
    prompt.info["task"] = str(folder)

    async def main() -> list:
        await terminal.start(TrainConfig())
        async with playing(tokenizer, prompt, *script, max_new_tokens=90_000) as (episodes, _, _):
            return await asyncio.gather(*map(terminal, episodes), return_exceptions=True)

    return asyncio.run(main())


def results(tokenizer: Tokenizer, played: Trajectory | BaseException) -> list[str]:
    assert isinstance(played, Trajectory), repr(played)
    parts = tokenizer.decode(played.tokens).split("<tool_response>")[1:]
    return [part.partition("</tool_response>")[0].strip() for part in parts]


def containers() -> list[str]:
    command = ["docker", "ps", "-q", "--filter", "name=areal-lite-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_tasks_are_prompts(tmp_path: Path, tokenizer) -> None:
    for name in ("one", "two"):
        make_task(tmp_path / "tasks" / name)
    data = DataConfig(source="harbor", path=str(tmp_path / "tasks"))
    opened = problems(data, tokenizer, "train")
    assert opened.num_prompts == 2
    prompts = [opened[number] for number in range(2)]
    assert [prompt.prompt_id for prompt in prompts] == ["one", "two"]
    assert "Write bye" in prompts[0].text
    assert prompts[1].info["task"] == str(tmp_path / "tasks" / "two")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"instruction.md": None}, "instruction.md"),
        ({"task.toml": "[verifier"}, "one/task.toml: Expected"),
        ({"tests/test.sh": None}, "has no tests/test.sh"),
        ({"environment/Dockerfile": None}, "neither environment/Dockerfile nor a docker_image"),
        ({"task.toml": "[environment]\ngpus = 1"}, "task.toml: gpus is not supported"),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "steps/a/instruction.md"),
        ({"environment/docker-compose.yaml": ""}, "compose.yaml is not supported"),
        ({"task.toml": "multi_step_reward_strategy = 'sum'"}, "strategy=sum is unknown"),
        ({"task.toml": "environment.healthcheck.command = 'ls'"}, "healthcheck is not supported"),
        ({"task.toml": "verifier.environment_mode = 'separate'"}, "environment of their own"),
        ({"task.toml": "environment = 'a'"}, "one/task.toml: 'str' object"),
        ({"task.toml": "agent.env = 'a'"}, "one/task.toml: unsupported operand"),
        ({"task.toml": "steps = []\nagent = 1"}, "one/task.toml: "),
    ],
)
def test_a_task_that_cannot_be_played_is_refused(tmp_path, tokenizer, files, message) -> None:
    make_task(tmp_path / "tasks" / "one", **files)
    data = DataConfig(source="harbor", path=str(tmp_path / "tasks"))
    with pytest.raises(ValueError, match=message):
        problems(data, tokenizer, "train")
    with pytest.raises(ValueError, match="data.eval_path=null: there is no folder with a task"):
        problems(data, tokenizer, "eval")


def test_the_files_of_a_task_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    task = Task(
        make_task(tmp_path, **{"instruction.md": "\ufeffHello", "task.toml": f"\ufeff{TOML}"})
    )
    assert task.steps[0].instruction == "Hello"
    (tmp_path / "instruction.md").write_bytes("Hello".encode("utf-16"))
    with pytest.raises(ValueError, match="/instruction.md: 'utf-8' codec"):
        Task(tmp_path)


def test_the_image_is_named_by_what_it_is_built_of(tmp_path: Path) -> None:
    one, two = (make_task(tmp_path / name) for name in ("one", "two"))
    other = make_task(tmp_path / "other", **{"environment/more.txt": "x"})
    assert Task(one).image == Task(two).image != Task(other).image
    toml = "[environment]\ngpus = 0\ndocker_image = 'their/image:1'\nenv.WORD = 'x y'\n"
    toml += "allow_internet = true\nmemory = '4G'\n"
    made = Task(make_task(tmp_path / "made", **{"task.toml": toml}))
    assert made.image == "their/image:1" and "--memory=4G" in made.limits(False)
    assert "--env=WORD=x y" in made.limits(False)
    assert "--network=none" in made.limits(False) and "--network=none" not in made.limits(True)
    closed = toml.replace("true", "false")
    task = Task(make_task(tmp_path / "closed", **{"task.toml": closed}))
    assert "--network=none" in task.limits(True)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("1\n", 1.0),
        ("0.25", 0.25),
        ('{"reward": 0.5, "style": 1}', 0.5),
        ('{"score": 2}', 2.0),
        ('{"a": 1, "b": 2}', None),
        ('{"reward": 1, "style": null}', None),
        ("nan", None),
        ("", None),
        ("cat: no such file", None),
        ("[1]", None),
    ],
)
def test_rewards(text: str, reward: float | None) -> None:
    assert harbor._parsed(text).get("reward") == reward


STEPS = """multi_step_reward_strategy = "STRATEGY"
[verifier]
env = { WORD = "bye", OTHER = "kept" }
[[steps]]
name = "first"
min_reward = { style = 0.5 }
[[steps]]
name = "second"
[steps.agent]
user = "1234"
[steps.verifier]
env = { WORD = "more" }
[[steps]]
name = "third"
"""
STEP_TESTS = """[ "$OTHER" = kept ] && . /tests/helper.sh
if grep -q "^$WORD" /app/a.txt /app/open/b.txt; then echo 1 > /logs/verifier/reward.txt
elif [ -e /app/bad ]; then echo '{"reward": 0.25, "style": 0}' > /logs/verifier/reward.json
else echo '{"reward": 0.5, "style": 1}' > /logs/verifier/reward.json; fi
"""


def make_steps(folder: Path, strategy: str = "mean") -> Path:
    """Write a task of three steps; the tests of the third are its own, and give 0."""
    files = {f"steps/{n}/instruction.md": f"The {n} step." for n in ("first", "second", "third")}
    files |= {
        "task.toml": STEPS.replace("STRATEGY", strategy),
        "instruction.md": None,
        "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\nRUN mkdir -m 777 open\n",
        "tests/test.sh": STEP_TESTS,
        "tests/helper.sh": "echo helped >> /app/helped",
        "steps/second/workdir/new.txt": "new",
        "steps/second/workdir/setup.sh": "touch open/of_setup",
        "steps/third/tests/test.sh": "cat /tests/helper.sh && echo 0 > /logs/verifier/reward.txt",
    }
    return make_task(folder, **files)


def test_steps_are_laid_over_their_task(tmp_path: Path, tokenizer) -> None:
    task = Task(make_steps(tmp_path / "tasks" / "one"))
    first, second, third = task.steps
    assert [step.instruction for step in task.steps] == [
        "The first step.",
        "The second step.",
        "The third step.",
    ]
    assert second.verifier["env"] == {"WORD": "more", "OTHER": "kept"}
    assert first.verifier["env"]["WORD"] == third.verifier["env"]["WORD"] == "bye"
    assert third.tests == [task.folder / "tests", task.folder / "steps" / "third" / "tests"]
    assert first.is_missed({"reward": 1.0}) and first.is_missed({"reward": 1.0, "style": 0.4})
    assert not first.is_missed({"reward": 0.0, "style": 0.5}) and not second.is_missed({})
    opened = problems(DataConfig(path=str(tmp_path / "tasks")), tokenizer, "train")
    assert "The first step." in opened[0].text


@pytest.mark.timeout(180)
def test_each_episode_has_a_container_and_its_tests_give_the_reward(engine, tokenizer, tmp_path):
    folder = make_task(tmp_path / "task")
    edit = [bash("cat a.txt; touch mine"), bash("sed -i s/hello/bye/ a.txt"), "Done."]
    look = [bash("ls; exit 3"), bash("touch /tests/test.sh"), "Done."]
    edited, looked = play(tokenizer, folder, edit, look)
    assert results(tokenizer, edited) == ["hello", ""] and edited.reward == 1.0
    assert results(tokenizer, looked)[0] == "a.txt\n\nexit status 3" and looked.reward == 0.5
    assert containers() == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("strategy", "reward"), [("mean", 0.5), ("final", 0.0)])
def test_steps_share_a_container_and_a_conversation(
    engine, tokenizer, tmp_path, strategy: str, reward: float
) -> None:
    folder = make_steps(tmp_path / "task", strategy)
    whole = [
        bash("ls"),
        "Half.",
        bash("cat new.txt helped; ls -n open; echo more > open/b.txt"),
        bash("ls /tests"),
        "Done.",
        "No.",
    ]
    (played,) = play(tokenizer, folder, whole)
    first, second, third = results(tokenizer, played)
    assert first == "open"
    assert second.startswith("newhelped") and "1234" in second and "of_setup" in second
    assert "/tests" in third and "exit status 2" in third
    assert played.reward == reward
    said = tokenizer.decode(played.tokens)
    assert said.index("Half.") < said.index("The second step.") < said.index("The third step.")
    credits = [0, 0.5 / 3, 0, 0, 1 / 3, 0]
    assert played.turn_rewards == (credits if strategy == "mean" else None)
    assert containers() == []


@pytest.mark.timeout(180)
def test_a_step_that_is_missed_or_does_not_fit_ends_the_task(engine, tokenizer, tmp_path) -> None:
    folder = make_steps(tmp_path / "task")
    (missed,) = play(tokenizer, folder, [bash("touch bad"), "Done."])
    assert missed.reward == 0.25 and missed.finish_reason == "stop"
    (folder / "steps/second/instruction.md").write_text("long " * 90_000)
    (full,) = play(tokenizer, folder, ["Done."])
    assert full.reward == pytest.approx(0.5 / 3) and full.finish_reason == "length"


@pytest.mark.timeout(180)
def test_commands_that_flood_hang_or_stay(engine, tokenizer, tmp_path) -> None:
    folder = make_task(tmp_path / "task")
    script = [bash("seq 3000000"), bash("sleep 60"), bash("sleep 50 & echo on"), "Done."]
    (played,) = play(tokenizer, folder, script, command_timeout_s=3.0, max_characters=30)
    flood, hang, stay = results(tokenizer, played)
    assert flood.startswith("1\n2\n3") and "no end within 3 s" in hang and stay.startswith("on")
    assert containers() == []


@pytest.mark.timeout(180)
def test_a_container_ends_with_a_killed_worker(engine, tokenizer, tmp_path) -> None:
    folder = make_task(tmp_path / "task")
    code = f"""
import asyncio
from pathlib import Path
from areal_lite.environments.harbor import Task, _container

async def main():
    task = Task(Path({str(folder)!r}))
    await task.build()
    async with _container(task, False):
        print("up", flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
    assert len(containers()) == 1
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    deadline = time.monotonic() + 60
    while containers():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_without_tests_that_give_a_reward_the_episode_fails(engine, tokenizer, tmp_path) -> None:
    folder = make_task(tmp_path / "task", **{"tests/test.sh": "echo broken; exit 1"})
    (failed,) = play(tokenizer, folder, ["Done."])
    assert isinstance(failed, RuntimeError) and "wrote no reward: broken" in str(failed)
    broken = make_task(
        tmp_path / "other", **{"environment/Dockerfile": f"FROM {BASE}\nRUN exit 7\n"}
    )
    (failed,) = play(tokenizer, broken, ["Done."])
    assert isinstance(failed, RuntimeError) and "cannot be built" in str(failed)


def test_no_engine_is_said_before_the_run(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="need the program docker: install it"):
        asyncio.run(Terminal().start(TrainConfig()))


def test_an_image_may_be_pulled_and_the_engine_may_warn(monkeypatch, tmp_path) -> None:
    task = Task(make_task(tmp_path / "task"))
    docker = tmp_path / "docker"
    starts = "echo \"Unable to find image 'one' locally\" >&2; echo WARNING: no swap >&2"
    docker.write_text(f'#!/bin/sh\n[ "$1" = run ] || exit 0\n{starts}\n${{SAYS}}; exec cat\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    async def name() -> str:
        async with harbor._container(task, internet=False) as container:
            return container

    monkeypatch.setenv("SAYS", "echo ready")
    assert asyncio.run(name()).startswith("areal-lite-")
    monkeypatch.setenv("SAYS", "exit 125")
    with pytest.raises(ToolsLost, match="(?s)does not start: Unable to find image.*no swap"):
        asyncio.run(name())
