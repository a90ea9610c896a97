"""The device `cpu`: what the core asks of a machine without a GPU (extensions.py).

Nothing here imports torch before it must: the supervisor of a run asks for the environments.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_lite.megatron.kernels import Kernels
    from areal_lite.megatron.patches import Substitution

PLATFORM = "areal_lite_cpu"
"""The entry of SGLang's platforms (pyproject.toml)."""
_COMMON = {
    # Large tensors on huge pages. Attention reads single slots all over the KV cache, and a step of
    # training writes to memory that the system has just given it. Pages of 4 KiB make both slower.
    "THP_MEM_ALLOC_ENABLE": "1",
    # With more threads than free cores, waiting threads would spin and take cores away from working
    # ones. A few turns, some microseconds, bridge the time between two operators.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "2000",
    # On a CPU torch.compile costs more at the start than the few fused operations save later: a
    # server would import the compiler for each function that SGLang decorates.
    "TORCHDYNAMO_DISABLE": "1",
}


def rank_environment() -> dict[str, str]:
    """Return the environment of a trainer rank, whose threads cores.py decides.

    Each number of tokens has about ten oneDNN primitives of its own, of 0.4 MB each. oneDNN and
    torch both cache 1,024 of them. A step needs few of the previous step's, and their small blocks
    between large tensors keep the heap from shrinking.
    """
    return {
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "LRU_CACHE_CAPACITY": "64",
        "OPENBLAS_NUM_THREADS": "1",
        **_COMMON,
    }


def server_flags() -> dict[str, Any]:
    """Return the options of an SGLang server."""
    return {
        "device": "cpu",
        # The backend of areal_lite/cpu/sglang has this name there: see cpu/sglang/platform.py.
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "page_size": 16,  # that of the kernel (areal_lite/cpu/kernels/paged_attention.py)
        # SGLang's default would take 2 GB.
        "max_total_tokens": 65536,
        # An idle scheduler would spin on one core.
        "sleep_on_idle": True,
        # Without a GPU nothing overlaps.
        "disable_overlap_schedule": True,
        # SGLang would stop decoding for each new group of requests. A prefill without a GPU takes
        # as long for a few requests as for many, so it waits for some decode steps.
        "prefill_decode_interval": 4,
    }


def server_environment() -> dict[str, str]:
    """Return the environment of an SGLang server: one thread, unless OMP_NUM_THREADS is set.

    Two threads help only above a few million parameters.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {
        "SGLANG_PLATFORM": PLATFORM,
        "CUDA_VISIBLE_DEVICES": "",  # `server.device=cpu` holds on a machine with GPUs too
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Products of each number of rows have a oneDNN primitive of 0.4 MB. 1,024 would be kept.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        "LRU_CACHE_CAPACITY": "256",
        # Of gated delta nets. SGLang's default is bfloat16.
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        **_COMMON,
    }


def prepare_server() -> None:
    """Install stand-ins for packages that SGLang imports and a text model never calls.

    Then SGLang can be imported, and learns of the algorithm for speculation.
    """
    from areal_lite.cpu.sglang.stand_ins import install_stand_ins

    install_stand_ins()
    from areal_lite.cpu.sglang import speculation

    speculation.register()


def megatron_substitutions() -> tuple[Substitution, ...]:
    """Return the substitutions in Megatron-core's source."""
    import torch

    from areal_lite.cpu.megatron import CPU_SUBSTITUTIONS, ONEDNN_SUBSTITUTIONS

    onednn = torch.backends.mkldnn.is_available()
    return CPU_SUBSTITUTIONS + (ONEDNN_SUBSTITUTIONS if onednn else ())


def install_kernels(kernels: Kernels) -> None:
    """Replace operators of the trainer."""
    from areal_lite.cpu.trainer import install

    install(kernels)
