"""Gather tensors of host memory over a group whose backend may take GPU tensors only."""

import torch
import torch.distributed as dist
from torch import Tensor

from areal_lite.megatron.parallel import current_device

# Numbers of a rank that are on the GPU at a time: 64 MiB in float32.
_PIECE = 1 << 24


def all_gather_on_host(received: list[Tensor], own: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `received` with the tensor `own` of each rank of `group`. Every rank calls it.

    All of them are flat, of one size, in host memory.
    """
    if len(received) == 1:
        received[0].copy_(own)
        return
    device = current_device()
    for start in range(0, len(own), _PIECE):
        piece = own[start : start + _PIECE].to(device)
        pieces = [torch.empty_like(piece) for _ in received]
        dist.all_gather(pieces, piece, group)
        for whole, part in zip(received, pieces, strict=True):
            whole[start : start + _PIECE].copy_(part)
