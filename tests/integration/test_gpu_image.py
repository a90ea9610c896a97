"""The Docker target `gpu` on a stand-in for SGLang's image. It needs a Docker Engine with BuildKit.

The stand-in has packages with the names and versions of the large ones and nothing in them. A build
that replaced one of them would install gigabytes, and the stand-in's mark would be gone. As in
SGLang's image, NCCL is newer than the one that torch asks for.
"""

import json
import re
from collections.abc import Iterator

import pytest

from tests.integration.docker_engine import (
    ROOT,
    base_image,
    docker,
    packages,
    pinned_versions,
    run_in,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STAND_IN, IMAGE = "areal_lite_test:sglang", "areal_lite_test:gpu"
LARGE = {
    "torch": "2.13.0+cu130",
    "transformers": "5.12.1",
    "triton": "3.7.1",
    "nvidia_nccl_cu13": "2.30.7",
    "flash_attn_4": "4.0.0",
    "numpy": "2.3.5",
}
IS_LARGE = re.compile("torch|transformers|triton|nvidia|cuda|flash|sglang|numpy|xgrammar")
BASE = """\
FROM {python}
ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY . /sgl-workspace/
RUN cd /sgl-workspace && python3 -m pip install --no-index --no-deps --no-build-isolation {large} \\
    && python3 -m pip install --no-index --no-deps --no-build-isolation -e sglang
"""
NEEDS = {"torch": ["nvidia-nccl-cu13==2.29.7", "triton==3.7.1"]}
SETUP = """\
from setuptools import setup
setup(name="{name}", version="{version}", py_modules=["{name}"], install_requires={needs})
"""


@pytest.fixture(scope="module")
def python_image() -> str:
    """The base of the target `cpu`, which has Python and pip."""
    return base_image()


@pytest.fixture(scope="module")
def images(python_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Build the stand-in, and the target `gpu` on it."""
    folder = tmp_path_factory.mktemp("stand-in")
    for name, version in {**LARGE, "sglang": "0.5.21"}.items():
        (folder / name).mkdir()
        setup = SETUP.format(name=name, version=version, needs=NEEDS.get(name, []))
        (folder / name / "setup.py").write_text(setup)
        (folder / name / f"{name}.py").write_text("mark = 'of the base image'\n")
    large = " ".join(f"./{name}" for name in LARGE)
    (folder / "Dockerfile").write_text(BASE.format(python=python_image, large=large))
    docker("build", "-q", "-t", STAND_IN, str(folder), timeout_s=600)
    on_it = ["--build-arg", f"GPU_BASE={STAND_IN}", "--target", "gpu", "-t", IMAGE]
    docker("build", "-q", *on_it, str(ROOT), timeout_s=1500)
    yield
    docker("image", "rm", "-f", IMAGE, STAND_IN)


def test_only_this_package_and_small_ones_are_added(images):
    base, built = packages(STAND_IN), packages(IMAGE)
    assert {name: built[name] for name in base} == base
    assert {name: built[name] for name in LARGE} == LARGE and built["sglang"] == "0.5.21"
    added = built.keys() - base.keys()
    assert {"areal_lite", "megatron_core", "hydra_core", "pyzmq"} <= added
    assert not [name for name in added if IS_LARGE.search(name)]
    tested = pinned_versions() | {"areal_lite": built["areal_lite"]}
    assert {name: built[name] for name in added} == {name: tested.get(name) for name in added}
    mark = "import torch, sglang; print(torch.mark, '+', sglang.mark)"
    assert run_in(IMAGE, f'python3 -c "{mark}"') == "of the base image + of the base image"


def test_it_runs_as_its_user_who_may_write_only_where_runs_write(images):
    assert run_in(IMAGE, "id -u; pwd") == "10001\n/runs"
    run_in(IMAGE, "touch /runs/a /models/a /kernels/a")
    denied = run_in(IMAGE, "touch /opt/areal_lite/areal_lite/a 2>&1 || true")
    assert "Permission denied" in denied


def test_compiled_kernels_are_in_a_volume(images):
    (inspected,) = json.loads(docker("image", "inspect", IMAGE))
    settings = inspected["Config"]
    assert settings["User"] == "10001" and list(settings["Volumes"]) == ["/kernels"]
    variables = dict(item.split("=", 1) for item in settings["Env"])
    caches = ("XDG_CACHE_HOME", "SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR", "TRITON_CACHE_DIR")
    assert all(variables[name].startswith("/kernels") for name in caches)


def test_its_command_works_and_sglang_finds_the_plugins(images):
    assert "quickstart" in docker("run", "--rm", IMAGE, "--help")
    entries = "from importlib.metadata import entry_points as e; print(*e(group='{}').names)"
    for group, plugin in (("plugins", "areal_lite"), ("platforms", "areal_lite_cpu")):
        names = run_in(IMAGE, f'python3 -c "{entries.format("sglang.srt." + group)}"')
        assert plugin in names.split()
