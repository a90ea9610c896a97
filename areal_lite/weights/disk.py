"""The `disk` transport: a Hugging Face checkpoint in a folder that the servers can read.

On one machine a folder on tmpfs makes it a memory copy.
"""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file


class WeightFolder:
    """The checkpoints of one trainer, in a folder of its own under `root`.

    `model` is the folder of the initial checkpoint, for its config.json.
    """

    def __init__(self, root: Path, model: Path):
        self._root = root
        self._model = model
        self._own: Path | None = None

    def write(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int) -> Path:
        """Write all weights and return their folder. The servers still generate meanwhile."""
        if self._own is None:
            self._root.mkdir(parents=True, exist_ok=True)
            self._own = Path(tempfile.mkdtemp(prefix="areal_lite-", dir=self._root)).resolve()
        folder = self._own / f"v{version}"
        folder.mkdir(exist_ok=True)  # it exists when a version is pushed again
        shutil.copy(self._model / "config.json", folder / "config.json")
        for number, bucket in enumerate(buckets):
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
            save_file(tensors, folder / f"model-{number:05d}.safetensors")
        return folder

    def keep_only(self, folder: Path) -> None:
        """Remove the other versions."""
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)

    def close(self) -> None:
        """Remove everything that was written."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
