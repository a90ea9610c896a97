"""Proof that a push arrived: a few tensors are read back from every server and compared with the trainer's, bit by bit.

SGLang's `/get_weights_by_name` answers for some architectures only; the plugin in areal_lite/servers/readback_plugin.py makes it answer for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from areal_lite.servers.control import post
from areal_lite.servers.registry import ServerInfo


class Readback:
    """Keeps the tensors to compare while buckets pass by, then compares them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def watch(
        self, buckets: Iterable[list[tuple[str, torch.Tensor]]]
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Pass buckets on. Kept are the tensors with the same name on both sides: norms, and the projections that SGLang does not fuse."""
        for bucket in buckets:
            self.tensors.update(
                (name, tensor)
                for name, tensor in bucket
                if name.endswith(("norm.weight", "0.mlp.down_proj.weight"))
            )
            yield bucket

    def verify(self, server: ServerInfo, timeout_s: float) -> int:
        """Compare checksums on `server`; returns how many tensors were compared.

        Raises ServerError if it does not answer, ValueError if it has other weights or cannot tell."""
        compared = 0
        for name, tensor in self.tensors.items():
            if tensor.dim() > 1 and server.tensor_parallel > 1:
                continue  # the server's ranks hold slices of it
            answer = post(
                server,
                "/get_weights_by_name",
                {"name": name, "truncate_size": tensor.shape[0]},
                timeout_s,
            )
            if answer is None:
                raise ValueError(
                    f"server {server.name} cannot read {name} back: sync.verify needs servers started with AREAL_LITE_READBACK=1"
                )
            theirs = torch.from_numpy(np.asarray(answer, np.float32)).to(tensor.dtype)
            if checksum(theirs) != checksum(tensor):
                raise ValueError(
                    f"server {server.name}: {name} differs from the trainer's after the push"
                )
            compared += 1
        return compared


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    return hashlib.sha256(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()
