"""The `disk` transport: a Hugging Face checkpoint in a folder that the servers see too. On one machine a tmpfs makes it a memory copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from areal_lite.rollout.server import ServerInfo
from areal_lite.sync.control import post_all


class WeightFolder:
    """Writes version after version under `root`, each in a folder of its own; the one before the last is removed."""

    def __init__(self, root: Path, model: Path):
        self.root, self.model = root, model

    def write(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int) -> Path:
        """Write the weights, complete before anyone is told of them. Happens while the servers still generate."""
        folder = self.root / f"v{version}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.model / "config.json", folder / "config.json")
        for number, bucket in enumerate(buckets):
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in bucket}, folder / f"model-{number:05d}.safetensors")
        return folder

    def load(self, servers: list[ServerInfo], folder: Path, version: int, flush_cache: bool, timeout_s: float) -> None:
        """Have paused servers load it. Without the pause this call would wait until every running request has finished."""
        body = {"model_path": str(folder.resolve()), "weight_version": str(version), "flush_cache": flush_cache}
        post_all(servers, "/update_weights_from_disk", body, timeout_s)
        for old in self.root.glob("v*"):
            if old != folder:
                shutil.rmtree(old)
