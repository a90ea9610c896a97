"""The `disk` transport: a Hugging Face checkpoint in a folder that the servers see too. On one machine a tmpfs makes it a memory copy."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file


class WeightFolder:
    """Writes version after version into a folder of its own under `root`; nothing else there is touched."""

    def __init__(self, root: Path, model: Path):
        self.root, self.model = root, model
        self.own: Path | None = None

    def write(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int) -> Path:
        """Write the weights, complete before anyone is told of them. Happens while the servers still generate."""
        if self.own is None:
            self.root.mkdir(parents=True, exist_ok=True)
            self.own = Path(tempfile.mkdtemp(prefix="areal_lite-", dir=self.root)).resolve()
        folder = self.own / f"v{version}"
        folder.mkdir(exist_ok=True)  # pushed again: the same weights
        shutil.copy(self.model / "config.json", folder / "config.json")
        for number, bucket in enumerate(buckets):
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in bucket},
                folder / f"model-{number:05d}.safetensors",
            )
        return folder

    def keep_only(self, folder: Path) -> None:
        """Remove the older versions."""
        for old in folder.parent.iterdir():
            if old != folder:
                shutil.rmtree(old)

    def close(self) -> None:
        """Remove everything that was written."""
        if self.own is not None:
            shutil.rmtree(self.own, ignore_errors=True)
