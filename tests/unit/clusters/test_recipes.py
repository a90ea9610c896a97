"""Recipes for Kubernetes and SkyPilot: their fields, their settings, and their image."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_lite.clusters.run_files import ENV_KEY
from areal_lite.config.command_line import compose_config
from areal_lite.run_dir.paths import STOP_FILE
from areal_lite.run_dir.resume import STOPPED

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
JOB, NODES = ROOT / "examples/kubernetes/run.yaml", ROOT / "examples/kubernetes/nodes.yaml"
SKY = yaml.safe_load((ROOT / "examples/skypilot/run.yaml").read_text())


def settings_of(words: list[str]) -> Any:
    """Compose the settings of `… train SETTINGS`."""
    return compose_config("train", words[words.index("train") + 1 :])


@pytest.fixture
def pod() -> dict[str, Any]:
    _, job = yaml.safe_load_all(JOB.read_text())
    return job["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_kubernetes_knows_every_field(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    several = yaml.safe_load(NODES.read_text())
    assert several["kind"] == "List"
    for document in [*yaml.safe_load_all(JOB.read_text()), *several["items"]]:
        validator.validate(document, version, strict=True)


def test_the_job_trains_with_the_image_of_the_dockerfile(pod) -> None:
    (train,), (download,) = pod["containers"], pod["initContainers"]
    config = settings_of([*train["command"], *train["args"]])
    assert config.resume == "auto" and config.model == download["command"][-1]
    gpus = config.server.count + config.trainer.data_parallel
    assert train["resources"]["limits"] == {"nvidia.com/gpu": gpus}
    assert f"--uid {pod['securityContext']['runAsUser']} " in DOCKERFILE
    folders = {mount["mountPath"] for mount in train["volumeMounts"]} - {"/dev/shm"}
    gpu_image = DOCKERFILE[DOCKERFILE.index("FROM gpu-dependencies AS gpu") :]
    assert all(re.search(rf"mkdir .*{folder}\b", gpu_image) for folder in folders)


def test_roles_on_several_nodes_fit_together() -> None:
    items = yaml.safe_load(NODES.read_text())["items"]
    jobs = {item["metadata"]["name"]: item["spec"] for item in items if item["kind"] == "Job"}
    controller, servers, trainer = (
        jobs[f"areal-lite-{role}"] for role in ("controller", "servers", "trainer")
    )
    for job in (controller, servers, trainer):
        assert job["podReplacementPolicy"] == "Failed", "two pods of a role would work at a time"
    download, prepare = controller["template"]["spec"]["initContainers"]
    words = [*prepare["command"], *prepare["args"]]
    config = settings_of([word for word in words if word != "--prepare"])
    assert config.resume == "auto" and config.model == download["command"][-1]
    _, sharing = controller["template"]["spec"]["containers"]
    (service,) = (item for item in items if item["kind"] == "Service")
    (port,) = service["spec"]["ports"]
    hub = f"{service['metadata']['name']}:{port['port']}"
    assert f"areal_lite.clusters.hub {config.run_dir} {port['port']}\n" in sharing["command"][-1]
    for job, processes in (servers, config.server.count), (trainer, config.trainer.data_parallel):
        pod = job["template"]["spec"]
        (role,) = pod["containers"]
        own = role["resources"]["limits"]["nvidia.com/gpu"]
        assert job.get("completions", 1) == job.get("parallelism", 1)
        assert job.get("completions", 1) * own == processes
        assert re.search(rf"( |=){own}$", role["command"][-1])
        assert f"{config.run_dir} {hub}" in " ".join(role["command"])
        assert not any("persistentVolumeClaim" in volume for volume in pod["volumes"])
        assert role["env"] == sharing["env"] and role["env"][0]["name"] == ENV_KEY
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "areal-lite-controller"}
    for module in set(re.findall(r"areal_lite\.[\w.]+", NODES.read_text())):
        assert importlib.util.find_spec(module), module
    assert config.run_dir in str(controller["template"]["spec"]["containers"])


def test_a_stopped_run_is_not_a_failed_one(pod) -> None:
    _, job = yaml.safe_load_all(JOB.read_text())
    (train,) = pod["containers"]
    codes = [rule["onExitCodes"] for rule in job["spec"]["podFailurePolicy"]["rules"][1:]]
    assert codes == [{"containerName": train["name"], "operator": "In", "values": [STOPPED]}]
    stop = train["lifecycle"]["preStop"]["exec"]["command"][-1]
    run_dir = settings_of([*train["command"], *train["args"]]).run_dir
    assert stop.startswith(f"touch {run_dir}/{STOP_FILE}\n")


def test_skypilot_trains_with_the_base_of_the_image() -> None:
    base = re.search(r"^ARG GPU_BASE=(.+)$", DOCKERFILE, re.MULTILINE)
    assert base and SKY["resources"]["image_id"] == f"docker:{base[1]}"
    command = SKY["run"].replace("$SETTINGS", SKY["envs"]["SETTINGS"])
    config = settings_of(shlex.split(command))
    gpus = {int(name.partition(":")[2]) for name in SKY["resources"]["accelerators"]}
    assert gpus == {config.server.count + config.trainer.data_parallel}
    kept = re.search(r"kept='(.+)'", SKY["setup"])
    assert kept and kept[1] in DOCKERFILE
