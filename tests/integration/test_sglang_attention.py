"""The CPU attention backend agrees with SGLang's own on random ragged batches in a KV pool.

It runs in a process of its own: SGLang needs its stand-in for torchvision, which transformers in
the test process must not see.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compare_attention.py")


@pytest.mark.parametrize("dtype, tolerance", [("float32", "1e-5"), ("bfloat16", "2e-2")])
def test_equals_the_stock_backend(dtype, tolerance):
    environment = os.environ | {
        "SGLANG_PLATFORM": "areal_lite_cpu",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(SCRIPT), dtype, tolerance]
    result = subprocess.run(
        command, env=environment, cwd=SCRIPT.parents[2], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "batches agree" in result.stdout
