"""A trainer without a GPU does not keep a oneDNN primitive for each number of tokens."""

import os
import subprocess
import sys

import pytest

from areal_lite.cpu.device import rank_environment

GROWTH = """
import ctypes, torch

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
weight = torch.randn(256, 256)
for tokens in range(1, 401):
    torch.ops.mkldnn._linear_pointwise(torch.randn(tokens, 256), weight, None, "none", [], "")
    if tokens in (100, 400):
        print(libc.mallinfo2().uordblks)
"""


def growth_mib(environment: dict[str, str]) -> float:
    """Return what 300 more numbers of tokens leave in use on the heap, in MiB."""
    command = [sys.executable, "-c", GROWTH]
    ran = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    before, after = map(int, ran.stdout.split())
    return (after - before) / 2**20


@pytest.mark.slow
def test_primitives_of_many_shapes_do_not_pile_up() -> None:
    environment = rank_environment()
    assert growth_mib(environment) < 5
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # both must be bounded
        assert growth_mib(environment | {name: "1024"}) > 10, name
