"""Stand-ins import, decorate as SGLang does when it is imported, and fail when they are used."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = """
import importlib.util
import sys

importlib.util.find_spec = lambda name: None
# Python's own modules, and this checkout.
sys.path[:] = [
    path
    for path in sys.path
    if path == "" or path.startswith(sys.base_prefix) and "site-packages" not in path
]
from areal_lite.cpu.sglang.stand_ins import install_stand_ins

install_stand_ins()
import triton
import triton.language as tl
from IPython.display import HTML
from torchvision.transforms import functional

@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["size"])
@triton.jit
def kernel(size, BLOCK: tl.constexpr):
    return size

assert kernel(3, 4) == 3
target = triton.runtime.driver.active.get_current_target
for use in (lambda: kernel[(1,)](3), lambda: functional.resize(1), lambda: HTML(""), target):
    try:
        use()
    except (TypeError, ImportError, RuntimeError) as error:
        print(error)
"""


def test_kernels_are_plain_functions_and_other_calls_name_the_package():
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        "'function' object is not subscriptable",
        "torchvision.transforms.functional.resize was called, but torchvision is not installed:"
        " this server can run text models only",
        "IPython.display.HTML was called, but IPython is not installed:"
        " this server can run text models only",
        "there is no GPU",
    ]
