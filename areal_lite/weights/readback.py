"""Proof that a push arrived: tensors are read back from every server and compared bit by bit.

The servers must have been started with AREAL_LITE_READBACK=1 (areal_lite/sglang_plugins).
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from areal_lite.servers.blocking import post
from areal_lite.servers.registry import ServerInfo

# Tensors with the same name on both sides: norms, and a projection that SGLang does not fuse.
_SAME_NAME = ("norm.weight", "0.mlp.down_proj.weight")
# The rows of a matrix to compare. They travel as JSON: a whole matrix of a 7B model takes 1.3 GB.
_MAX_ROWS = 8


class Readback:
    """A few tensors of a push, kept to compare them with the servers' afterwards."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def watch(
        self, buckets: Iterable[list[tuple[str, torch.Tensor]]]
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Pass buckets on, and keep the tensors to compare."""
        for bucket in buckets:
            self.tensors.update((name, t) for name, t in bucket if name.endswith(_SAME_NAME))
            yield bucket

    def verify(self, server: ServerInfo, timeout_s: float) -> int:
        """Compare the tensors with those on `server`, and return how many were compared.

        Raises ValueError if the server has other weights or cannot read them.
        """
        compared = 0
        for name, tensor in self.tensors.items():
            if tensor.dim() > 1 and server.tensor_parallel > 1:
                continue  # each rank of the server holds a slice
            rows = tensor.shape[0] if tensor.dim() == 1 else min(_MAX_ROWS, tensor.shape[0])
            body = {"name": name, "truncate_size": rows}
            answer = post(server, "/get_weights_by_name", body, timeout_s)
            if answer is None:
                raise ValueError(
                    f"server {server.name} cannot read {name} back:"
                    " sync.verify needs servers started with AREAL_LITE_READBACK=1"
                )
            theirs = torch.from_numpy(np.asarray(answer, np.float32)).to(tensor.dtype)
            if checksum(theirs) != checksum(tensor[:rows]):
                raise ValueError(
                    f"server {server.name}: {name} differs from the trainer's after the push"
                )
            compared += 1
        return compared


def checksum(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()
