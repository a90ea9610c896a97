"""The ways of the weights to the servers: `sync.transport`.

distributed   buckets over a process group (broadcast.py)
adapters      the same, of adapters alone
disk          a checkpoint in a folder that the servers can read
memory        where an installed package has it (extensions.py): without GPUs
"""

import logging
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from areal_lite.config import TrainConfig
from areal_lite.extensions import TRANSPORTS, load
from areal_lite.run_dir.paths import WEIGHTS_DIR
from areal_lite.servers.registry import ServerInfo
from areal_lite.weights.broadcast import Broadcast
from areal_lite.weights.recipients import FROM_DISK, Bucket, Pause, PushRecipients

log = logging.getLogger(__name__)

BUCKET_BYTES = 512 * 2**20
"""Weights sent at a time."""


class Transport(Protocol):
    """How the weights of one trainer get to its servers."""

    def transfer(
        self, recipients: PushRecipients, buckets: Iterable[Bucket], pause: Pause, *, apart: bool
    ) -> None:
        """Give the weights to the servers, and pause them as shortly as can be.

        Args:
            apart: whether these are only the servers that missed a push. What connects the trainer
                with the others stays as it is.
        """
        ...

    def close(self, servers: list[ServerInfo]) -> None:
        """Leave the servers, and remove everything that was written for them."""
        ...


def choose_transport(config: TrainConfig) -> str:
    """Return the transport of a run whose trainer is, or will be, on this machine."""
    if config.sync.transport != "auto":
        return config.sync.transport
    memory = load(TRANSPORTS, "memory")
    return "memory" if memory and memory.fits(config) else "distributed"


def make_transport(config: TrainConfig, device: torch.device, run_dir: Path) -> Transport:
    """Make the transport of a run. `device`: of the trainer's weights."""
    chosen = choose_transport(config)
    log.info("the servers get weights by %s", chosen)
    match chosen:
        case "distributed" | "adapters":
            return Broadcast(config, "nccl" if device.type == "cuda" else "gloo")
        case "disk":
            return Folder(Path(config.sync.disk_path or run_dir / WEIGHTS_DIR), Path(config.model))
        case _:
            if (transport := load(TRANSPORTS, chosen)) is None:
                raise ValueError(
                    f"sync.transport={chosen} is not installed here: use sync.transport=distributed"
                )
            return transport()


class Folder:
    """The checkpoints of one trainer, in a folder of its own under `root`.

    On one machine a folder on tmpfs makes it a memory copy. `model` is the folder of the initial
    checkpoint, for its config.json.
    """

    def __init__(self, root: Path, model: Path):
        self._root = root
        self._model = model
        self._own: Path | None = None

    def transfer(
        self, recipients: PushRecipients, buckets: Iterable[Bucket], pause: Pause, *, apart: bool
    ) -> None:
        version = recipients.report.version
        folder = self.write(buckets, version)
        with pause(recipients) as window:
            # The servers are paused: otherwise this call would wait until every running request
            # has finished.
            body = {
                "model_path": str(folder),
                "weight_version": str(version),
                "flush_cache": window.flush_cache,
            }
            recipients.post(FROM_DISK, body)
        self.keep_only(folder)

    def write(self, buckets: Iterable[Bucket], version: int) -> Path:
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

    def close(self, servers: list[ServerInfo]) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
