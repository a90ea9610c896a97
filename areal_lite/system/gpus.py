"""The GPUs of this machine, found without importing torch."""

import importlib.metadata
import os
from pathlib import Path

_DEVICES = Path("/dev")


def resolve_device(device: str) -> str:
    """Return `cuda` or `cpu` for the setting `device`, which may be `auto`.

    `auto` is `cuda` when an NVIDIA device is visible and the installed torch can use it.
    """
    if device != "auto":
        return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    cpu_torch = importlib.metadata.version("torch").endswith("+cpu")
    return "cuda" if _device_count() and not hidden and not cpu_torch else "cpu"


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]
    return [str(i) for i in range(_device_count())]


def _device_count() -> int:
    """Count the device files of GPUs. WSL has one file, for what is usually one GPU."""
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
