"""Operators of a server without a GPU: results equal to SGLang's torch code, shares of threads."""

import subprocess
import sys

import pytest

# SGLang decides at its import which platform it runs on, so each case is a process of its own.
_COMPARE = """
import torch
torch.set_num_threads({threads})
from areal_lite.cpu.sglang.stand_ins import install_stand_ins
install_stand_ins()
import sglang
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from areal_lite.cpu.kernels import norms
from areal_lite.cpu.sglang.operators import rms_norm, rotary_embedding

torch.manual_seed(0)
dtype = torch.{dtype}
calls = []
for name in ("rms_norm", "rotate"):
    kernel = getattr(norms, name)
    setattr(norms, name, lambda *a, kernel=kernel: (calls.append(1), kernel(*a)))
with torch.no_grad():
    norm = RMSNorm(48, eps=1e-6, weight_dtype=dtype)
    norm.weight.copy_(torch.randn(48))
    x, residual = torch.randn(2, 7, 48).to(dtype)
    same = torch.testing.assert_close
    same(rms_norm(norm, x), norm.forward_native(x))
    same(rms_norm(norm, x, residual), norm.forward_native(x, residual))
    strided = torch.randn(7, 3, 96).to(dtype)[..., 5:53]
    same(rms_norm(norm, strided), norm.forward_native(strided))
    same(rms_norm(norm, x[:0]), norm.forward_native(x[:0]))
    for neox in (True, False):
        rotary = RotaryEmbedding(16, 16, 64, 10000, neox, dtype)
        positions = torch.tensor([0, 3, 63, 7, 7, 1, 2])
        query, key = torch.randn(7, 64).to(dtype), torch.randn(7, 2, 16).to(dtype)
        same(
            rotary_embedding(rotary, positions, query, key),
            rotary.forward_native(positions, query, key),
        )
print(len(calls))
"""


@pytest.mark.parametrize(
    ("threads", "dtype", "calls"),
    [
        pytest.param(1, "float32", 6, marks=pytest.mark.slow),
        (1, "bfloat16", 0),
        (2, "float32", 6),
    ],
)
def test_operators_equal_those_of_sglang(threads, dtype, calls):
    code = _COMPARE.format(threads=threads, dtype=dtype)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == [str(calls)]


_SHARE = """
import random
import numpy as np
from areal_lite.cpu.sglang.stand_ins import install_stand_ins
install_stand_ins()
import sglang
from areal_lite.cpu.sglang.attention import AttentionSpans

random.seed(0)
for case in range(300):
    lengths = np.array([random.randint(1, 50) for _ in range(random.randint(1, 30))])
    threads = random.randint(1, 6)
    shares = AttentionSpans(np.arange(len(lengths)), lengths).shares(threads)
    assert 1 <= len(shares) <= threads
    tokens = [t for share in shares for t in range(len(lengths))[share]]
    assert tokens == list(range(len(lengths)))
    keys = [lengths[share].sum() for share in shares]
    assert max(keys) <= lengths.sum() / threads + lengths.max()
print("shared")
"""


def test_threads_share_the_keys_of_a_batch():
    run = subprocess.run([sys.executable, "-c", _SHARE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["shared"]
