"""The NVIDIA driver, the CUDA toolkit and GPU memory, found without torch."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

# The wheels of torch and SGLang are built for CUDA 13, which needs this driver.
MIN_DRIVER = 580
# The memory of a GPU that a process takes before its first tensor.
CUDA_CONTEXT = 600 * 2**20
_TIMEOUT_S = 30.0


class GpuMemory(NamedTuple):
    """Memory of one GPU in bytes: all of it, and what no process has taken."""

    total: int
    free: int


def check_cuda() -> None:
    """Raise ValueError if a server could not run on a GPU of this machine.

    SGLang compiles kernels when it starts, so it needs nvcc besides the driver.
    """
    driver = _query("driver_version")
    major = driver.partition(".")[0]
    if major.isdigit() and int(major) < MIN_DRIVER:
        raise ValueError(
            f"NVIDIA driver {driver}: torch and SGLang use CUDA 13, which needs driver "
            f"{MIN_DRIVER} or newer; update the driver, or set server.device=cpu"
        )
    nvcc = cuda_home() / "bin" / "nvcc"
    if not os.access(nvcc, os.X_OK):
        raise ValueError(
            f"no CUDA compiler at {nvcc}: SGLang compiles kernels when it starts; install the CUDA "
            "13 toolkit and set CUDA_HOME to its folder, or put nvcc on the PATH"
        )


def cuda_home() -> Path:
    """Return the folder of the CUDA toolkit, searched where SGLang and tvm-ffi search it."""
    configured = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if configured:
        return Path(configured)
    nvcc = shutil.which("nvcc")
    return Path(nvcc).parents[1] if nvcc else Path("/usr/local/cuda")


def gpu_memory(gpu: str) -> GpuMemory | None:
    """Return the memory of a GPU, named as in CUDA_VISIBLE_DEVICES.

    None if nvidia-smi is missing or does not know it (a slice of a GPU, for example).
    """
    found = _query("memory.total,memory.free", gpu)
    try:
        total, free = (int(number) * 2**20 for number in found.split(","))
    except ValueError:
        return None
    return GpuMemory(total, free)


def _query(fields: str, gpu: str | None = None) -> str:
    """Return the first line of nvidia-smi's answer about a GPU; empty if there is none."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    if gpu is not None:
        command.append(f"--id={gpu}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
