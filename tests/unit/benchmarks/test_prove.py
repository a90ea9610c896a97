"""The page of benchmarks/prove.py, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
RESULTS = {
    "machine": {"GPUs": ["NVIDIA H100"], "python, torch, CUDA, NCCL": ["3.12", "2.13", "13.0", 1]},
    "product": {"matrix product, TFLOP/s": 600.0, "memory copy, GB/s": 1000.0},
    "tags": {"seams": 27, "wrong tags": 0},
    "sampling": {
        "sglang.benchmark.serving, tokens a second": 30000,
        "areal_lite's client, tokens a second": 29400,
    },
    "engine": {"TFLOP/s of matrices": 150},
    "learns": {
        "rewards": [0.0, 0.5, 1.0],
        "held-out accuracy before and after": [0.07, 0.695],
        "pause of a push, ms": 30.0,
        "a push, MiB": 256.6,
        "mfu": 0.031,
        "seconds a step": 0.5,
    },
}


@pytest.fixture
def prove(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import prove

    return prove


def results(**numbers: dict) -> dict:
    return {
        part: {"numbers": found, "checks": {"it ends well": True}, "seconds": 60.0, "status": 0}
        for part, found in (RESULTS | numbers).items()
    }


def test_each_number_stands_beside_that_of_a_plain_program(prove) -> None:
    text = prove.page(results(), "h100")
    for line in (
        "# What h100 proved",
        "NVIDIA H100; Python 3.12, torch 2.13, CUDA 13.0.",
        "| sampling, tokens a second | 29,400 | 30,000 (SGLang's own client) | 0.98 |",
        "| an update of 0.6B parameters, TFLOP/s | 150 | 600.0 (a product in bfloat16) | 0.25 |",
        "| pause for 256.6 MiB of weights, ms | 30.0 | 0.3 (a memory copy) | 111 × |",
        "| MFU of that run's updates | 3.1 % | 100.0 % |  |",
        "    ▁▅█",
        "**Failed:** nothing.",
    ):
        assert line in text.splitlines(), line
    assert "27 seams, 0 tokens with a wrong version" in text and "7.0 % → 69.5 %" in text
    assert "Missing" not in text and "Measured in 6 minutes" in text


def test_what_failed_and_what_is_missing_is_said(prove) -> None:
    found = results()
    del found["engine"], found["machine"]
    found["tags"]["checks"] = {"no token has the wrong version": False}
    text = prove.page(found, "x")
    assert "**Failed:** tags: no token has the wrong version." in text
    assert "**Missing:** machine, engine." in text and "TFLOP/s" not in text
    assert prove.page({}, "x").count("**Missing:** machine, product, tags,") == 1


@pytest.mark.parametrize("gpus", [0, 1])
def test_it_measures_what_is_missing_and_writes_the_page(
    prove, gpus, tmp_path, monkeypatch, capsys
) -> None:
    ran = []

    def run_part(name, log, *, tiny, server_args, limit_s):
        ran.append(name)
        return results()[name]

    monkeypatch.setattr(prove.gpu, "run_part", run_part)
    monkeypatch.setattr(prove.gpu, "visible_gpus", lambda: ["0"] * gpus)
    monkeypatch.setattr(sys, "argv", ["prove.py", "--name", "x", "--folder", str(tmp_path)])
    if not gpus:
        assert prove.main() == 2 and "no GPU is visible" in capsys.readouterr().out
        return
    known = {name: results()[name] for name in ("machine", "tags")}
    (tmp_path / "gpu-x.json").write_text(json.dumps(known))
    assert prove.main() == 0
    assert ran == ["product", "sampling", "engine", "learns"]
    page = (tmp_path / "prove-x.md").read_text()
    assert page == prove.page(results(), "x") and page in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_way_without_a_gpu(prove, tmp_path) -> None:
    command = [sys.executable, BENCHMARKS / "prove.py", "--tiny", "--folder", tmp_path]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--name", "x"], env=environment, timeout=800)
    assert done.returncode == 0
    page = (tmp_path / "prove-x.md").read_text()
    assert "**Failed:** nothing." in page and "**Missing:** machine." in page
    assert page.count("\n| ") == 4 and "0 tokens with a wrong version" in page
