"""The documented commands of docker compose, with the real program and on a real engine.

The services of the profile `gpu` run on the CPU image and without GPUs here. The names of project
and image are the test's own, so that nobody's volumes are touched.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compose_commands import LINES, parse
from tests.docs_commands import commands
from tests.integration.controller_run import wrong_with
from tests.integration.docker_engine import ROOT, base_image, docker, packages, pinned_versions

IMAGE, PROJECT = "areal_lite_test:compose", "areal_lite_test"
CHECKOUT = (
    ".dockerignore",
    ".env.example",
    "Dockerfile",
    "LICENSE",
    "areal_lite",
    "conf",
    "constraints.txt",
    "docker-compose.yaml",
    "examples",
    "pyproject.toml",
)
ON_CPU = f"image: {IMAGE}, ulimits: !reset {{}}, deploy: !reset {{}}"
BUILT_ON_CPU = f"{ON_CPU}, build: {{target: cpu}}"
SMALL = (
    "seed=1 data.args.max_digits=2 eval.problems=8 rollout.max_new_tokens=32"
    " rollout.max_concurrent=16"
    " trainer.steps=2 trainer.lr_warmup_steps=1 trainer.batch_groups=4 trainer.minibatches=1"
)
SETTINGS = {
    "QUICKSTART_RUN": "first",
    "QUICKSTART_OVERRIDES": f"{SMALL} sft.trainer.steps=20",
    "RUN": "second",
    "MODEL": "warm",
    "TRAINER_RANKS": "2",
    "SERVERS": "1",
    "OVERRIDES": f"{SMALL} data.source=addition data.path=null ~data.args.name"
    " reward.function=areal_lite_quickstart.addition:addition_reward eval.every=0",
}


def run(command: str, folder: Path, timeout_s: float = 60, status: int = 0) -> str:
    """Run a command as it is documented, without a terminal; return both of its outputs."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"COMPOSE_PROJECT_NAME": PROJECT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == status, done.stdout[-4000:]
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the images and the compose file need."""
    compose = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(compose, capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    for name in CHECKOUT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("line", sorted({line for lines in LINES.values() for line in lines}))
def test_the_program_accepts_a_command(line: str, checkout: Path) -> None:
    run(f"{line} --help", checkout)  # an unknown option fails in spite of it
    profiles = " ".join(f"--profile {profile}" for profile in parse(line).profiles)
    services = run(f"docker compose {profiles} config --services", checkout).split()
    assert set(parse(line).services) <= set(services)


def test_the_program_refuses_an_unknown_option(checkout: Path) -> None:
    with pytest.raises(AssertionError, match="unknown flag"):
        run("docker compose up --detached --help", checkout)


@pytest.fixture
def engine(checkout: Path) -> Iterator[Path]:
    """The checkout, and an engine that has none of the test's containers and volumes afterwards."""
    base_image()
    changes = dict.fromkeys(("servers", "controller", "trainer"), ON_CPU)
    changes |= dict.fromkeys(("quickstart", "prepare"), BUILT_ON_CPU)
    override = "".join(f"  {name}: {{{change}}}\n" for name, change in changes.items())
    (checkout / "docker-compose.override.yaml").write_text(f"services:\n{override}")
    yield checkout
    run("docker compose --profile gpu down --volumes --timeout 1", checkout, 120)
    docker("image", "rm", "--force", IMAGE)


def set_variables(file: Path, **changes: str) -> None:
    """Change the settings of a file `.env`, each of which has a line there."""
    text = file.read_text()
    for name, value in (SETTINGS | changes).items():
        text, found = re.subn(f"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
        assert found == 1, name
    file.write_text(text)


def summary(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run that made two steps."""
    written = json.loads((run_dir / "summary.json").read_text())
    assert written["steps"] == written["pushes"] == 2 and written["trajectories_lost"] == 0
    return written


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_node_runs_in_the_documented_order(engine: Path) -> None:
    lines = commands(ROOT / "docs" / "running.md")
    page = [line for line in lines if line.startswith(("cp .env", "docker compose"))]
    page = [line for line in page if "--profile monitor" not in line]
    settings, up, copy, up_gpu, logs, copy_gpu, down = page
    run(settings, engine)
    set_variables(engine / ".env")
    said = run(up, engine, 2400)
    assert "exited with code 0" in said, said[-4000:]
    tested, built = pinned_versions(), packages(IMAGE)
    assert {"torch", "sglang", "megatron_core", "aiohttp"} <= tested.keys() & built.keys()
    versions = {name: built[name].partition("+")[0] for name in tested.keys() & built.keys()}
    assert versions == {name: tested[name] for name in versions}
    run(copy, engine)
    assert (engine / "runs/first/report.html").exists() and summary(engine / "runs/first")
    shutil.copytree(engine / "runs/first/warm", engine / "models/warm")
    run("chmod -R a+rX models", engine)  # for user 10001: weights are written for their owner only
    run(up_gpu, engine, 600)
    said = run(logs, engine, 1200)
    run(copy_gpu, engine)
    assert summary(engine / "runs/second"), said[-4000:]
    assert run("docker compose --profile gpu ps --all --quiet", engine)
    run(down, engine, 120)
    assert not run("docker compose --profile gpu ps --all --quiet", engine)
    assert f"{PROJECT}_runs" in docker("volume", "ls", "--quiet").split()


COMPOSE = "docker compose --profile gpu"
UP = f"{COMPOSE} up -d trainer"


def settings(steps: int, lr: float = 0.001) -> str:
    """Return OVERRIDES for a run of small steps."""
    small = SETTINGS["OVERRIDES"].replace("trainer.steps=2", f"trainer.steps={steps}")
    return f"{small} trainer.lr={lr}"


def steps_of_run(folder: Path) -> int:
    """Count the steps, also while a container starts again."""
    metrics = f"{COMPOSE} cp controller:/runs/second/metrics.jsonl - 2> /dev/null"
    return int(run(f"{metrics} | tar -xO 2> /dev/null | wc -l", folder))


def await_steps(folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 300
    while steps_of_run(folder) < steps:
        assert time.monotonic() < deadline, run(f"{COMPOSE} logs --tail 50", folder)[-4000:]
        time.sleep(0.5)


def containers(folder: Path) -> dict[str, tuple[str, str, int]]:
    """Return the id, the state and the exit status of each service's container."""
    lines = run(f"{COMPOSE} ps --all --format json", folder).splitlines()
    found = [json.loads(line) for line in lines]
    return {one["Service"]: (one["ID"], one["State"], one["ExitCode"]) for one in found}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_roles_are_left_alone_killed_stopped_and_continued(engine: Path, tiny_model: str) -> None:
    shutil.copytree(tiny_model, engine / "models/warm")
    run("cp .env.example .env && chmod -R a+rX models", engine)
    environment = engine / ".env"
    set_variables(environment, OVERRIDES=settings(steps=500))
    run(UP, engine, 2400)
    await_steps(engine, 2)

    before = containers(engine)
    run(UP, engine, 120)  # a second one finds a run that is going on
    assert {name: one for name, one in containers(engine).items() if name != "prepare"} == {
        name: one for name, one in before.items() if name != "prepare"
    }
    assert "is left alone" in run(f"{COMPOSE} logs prepare", engine)
    set_variables(environment, OVERRIDES=settings(steps=500, lr=0.002))
    run(UP, engine, 120, status=1)
    assert "other settings of trainer.lr: end it first" in run(f"{COMPOSE} logs prepare", engine)
    assert "server-0.json" in run(f"{COMPOSE} exec -T servers ls /runs/second/servers", engine)
    await_steps(engine, steps_of_run(engine) + 2)

    run(f"{COMPOSE} stop", engine, 400)
    ended = {name: one[1:] for name, one in containers(engine).items()}
    assert ended["trainer"] == ended["controller"] == ("exited", 0), ended
    run(f"{COMPOSE} cp trainer:/runs/. stopped", engine)
    checkpoints = (engine / "stopped/second/checkpoints").glob("step-*/manifest.json")
    reached = max(int(file.parent.name.removeprefix("step-")) for file in checkpoints)
    assert reached >= 4 and (engine / "stopped/second/stop").exists()

    run(UP, engine, 120)  # with the other learning rate
    await_steps(engine, reached + 2)
    run(f"{COMPOSE} kill trainer", engine)
    run(f"{COMPOSE} stop --timeout 5", engine, 60)
    set_variables(environment, OVERRIDES=settings(steps=reached + 4))
    run(UP, engine, 120)
    run(f"{COMPOSE} logs -f trainer", engine, 600)
    deadline = time.monotonic() + 60
    while any(state == "running" for _, state, _ in containers(engine).values()):
        assert time.monotonic() < deadline, "the servers outlive their run"
        time.sleep(1)
    assert {status for _, _, status in containers(engine).values()} == {0}
    run(f"{COMPOSE} cp trainer:/runs/. ended", engine)
    assert wrong_with(engine / "ended/second") == {}
    assert json.loads((engine / "ended/second/summary.json").read_text())["steps"] == reached + 4


def lose(folder: Path, service: str) -> None:
    """Kill the processes of a container from outside, as the kernel does without memory."""
    number = containers(folder)[service][0]
    os.kill(int(docker("inspect", "--format", "{{.State.Pid}}", number)), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_container_that_dies_is_started_again(engine: Path, tiny_model: str) -> None:
    shutil.copytree(tiny_model, engine / "models/warm")
    run("cp .env.example .env && chmod -R a+rX models", engine)
    overrides = f"{settings(steps=400)} trainer.save_every=2"
    set_variables(engine / ".env", OVERRIDES=overrides)
    run(UP, engine, 2400)
    for services in (["trainer"], ["controller"], ["servers"], ["trainer", "controller"]):
        await_steps(engine, steps_of_run(engine) + 3)
        for service in services:
            lose(engine, service)
    await_steps(engine, steps_of_run(engine) + 3)
    restarts = {
        service: int(docker("inspect", "--format", "{{.RestartCount}}", number))
        for service, (number, *_) in containers(engine).items()
    }
    assert restarts == {"prepare": 0, "servers": 1, "controller": 2, "trainer": 2}
    run(f"{COMPOSE} stop", engine, 400)
    run(f"{COMPOSE} cp trainer:/runs/. stopped", engine)
    assert wrong_with(engine / "stopped/second") == {}
