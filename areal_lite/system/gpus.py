"""The GPUs of this machine, their driver, toolkit and memory, found without importing torch."""

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_DEVICES = Path("/dev")


def resolve_device(device: str) -> str:
    """Return `cuda` or `cpu`. `auto` is `cuda` if torch can use a visible NVIDIA device."""
    if device != "auto":
        return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    cpu_torch = importlib.metadata.version("torch").endswith("+cpu")
    return "cuda" if _device_count() and not hidden and not cpu_torch else "cpu"


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]
    return [str(i) for i in range(_device_count())]


def _device_count() -> int:
    """Count the device files of GPUs. WSL has one file, usually for one GPU."""
    return len(list(_DEVICES.glob("nvidia[0-9]*"))) or int((_DEVICES / "dxg").exists())


def gpu_environment(gpus: list[str]) -> dict[str, str]:
    """Return the environment in which a process sees only `gpus`; empty without GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def nccl_environment() -> dict[str, str]:
    """Return the NCCL settings that trainer ranks and servers share. The user's values win.

    Each side of a connection picks the kind of memory handle that it exports by NCCL_CUMEM_ENABLE
    alone, and two kinds cannot be connected. SGLang sets both variables to 0 where they are unset
    (`_set_envs_and_config`); NCCL's default is 1.
    """
    return {name: os.environ.get(name, "0") for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")}


def divide_gpus(gpus: list[str], count: int, size: int) -> list[list[str]]:
    """Give `size` GPUs to each of `count` servers, or none to each when there are none."""
    if gpus and len(gpus) < count * size:
        raise ValueError(
            f"{len(gpus)} GPUs for {count} servers of {size}:"
            " lower server.count or server.tensor_parallel"
        )
    return [gpus[i * size : (i + 1) * size] for i in range(count)]


MIN_DRIVER = 580  # the wheels of torch and SGLang are built for CUDA 13, which needs this driver
CUDA_CONTEXT = 600 * 2**20  # the memory of a GPU that a process takes before its first tensor
_TIMEOUT_S = 30.0


class GpuMemory(NamedTuple):
    """Memory of one GPU in bytes: all of it, and the part that is free."""

    total: int
    free: int


def check_cuda() -> None:
    """Raise ValueError if a server could not run on a GPU: SGLang needs a driver, and nvcc."""
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
    if configured := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(configured)
    nvcc = shutil.which("nvcc")
    return Path(nvcc).parents[1] if nvcc else Path("/usr/local/cuda")


def gpu_memory(gpu: str) -> GpuMemory | None:
    """Return the memory of a GPU in CUDA_VISIBLE_DEVICES; None if nvidia-smi does not know it."""
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
