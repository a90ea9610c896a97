"""TODO docstring."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path


def resolve_device(device: str) -> str:
    """`auto` as `cuda` or `cpu`, without importing torch: is there an NVIDIA device that we may see and a torch that could use it?"""
    if device != "auto":
        return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    present = (
        any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    )  # dxg: a GPU seen from WSL
    cpu_torch = importlib.metadata.version("torch").endswith("+cpu")
    return "cuda" if present and not hidden and not cpu_torch else "cpu"


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; does not import torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def visible(gpus: list[str]) -> dict[str, str]:
    """The environment of a process that shall see just these."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def deal(gpus: list[str], count: int, size: int) -> list[list[str]]:
    """`size` GPUs to each of `count` servers; nothing to each where there are none. Raises ValueError when there are too few."""
    if gpus and len(gpus) < count * size:
        raise ValueError(
            f"{len(gpus)} GPUs for {count} servers of {size}: lower server.count or server.tensor_parallel"
        )
    return [gpus[i * size : (i + 1) * size] for i in range(count)]
