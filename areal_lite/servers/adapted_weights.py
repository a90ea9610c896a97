"""Weights with adapters added, on a server: W from its checkpoint, A and B from a push.

A push of adapters alone (`sync.adapters_only`) sends A and B after the name of W, as PEFT does. The
`load_format` of its requests is `areal_lite_adapters:SCALE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from areal_lite.data.model_folder import weight_files

ADAPTERS = "areal_lite_adapters"
# Elements of W that are in float32 at a time.
_AT_A_TIME = 2**24

Named = tuple[str, torch.Tensor]


class AdaptedWeights:
    """W + SCALE * B A of every adapted weight of a bucket, computed when it is asked for.

    So a server holds one of them at a time. They have the dtype of A, and are computed in float32
    and rounded once. Raises ValueError, before anything is loaded, for tensors that do not fit the
    checkpoint.

    Args:
        tensors: A [rank, in] and B [out, rank] of each weight, in any order.
        folder: the server's checkpoint. The trainer has started from the same one.
        scale: alpha / rank.
    """

    def __init__(self, tensors: list[Named], folder: str, scale: float):
        self._scale = scale
        self._factors: dict[str, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        readers = _readers(folder)
        named = dict(tensors)
        for name in named:
            stem, factor, _ = name.rpartition(".lora_A.weight")
            if not factor:
                continue
            a, b = named[name], named[f"{stem}.lora_B.weight"]
            weight = f"{stem}.weight"
            if weight not in readers:
                raise ValueError(f"{folder} has no {weight}, which an adapter of the push adapts")
            shape = readers[weight].get_slice(weight).get_shape()
            if shape != [len(b), a.shape[1]]:
                raise ValueError(
                    f"{folder}: {weight} has shape {shape}, and its adapter is for "
                    f"{[len(b), a.shape[1]]}: start servers and trainer from one model"
                )
            self._factors[weight] = a, b, readers[weight]

    def __iter__(self) -> Iterator[Named]:
        for name, (a, b, reader) in self._factors.items():
            yield name, _add(reader.get_tensor(name), a, b, self._scale)


def _add(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute W + scale * B A on the device of A, a few rows at a time."""
    exact = torch.promote_types(a.dtype, torch.float32)
    weight = weight.to(a.device, a.dtype)
    result = torch.empty_like(weight)
    rows = max(_AT_A_TIME // weight.shape[1], 1)
    for own, part, out in zip(weight.split(rows), b.split(rows), result.split(rows)):
        out.copy_(torch.addmm(own.to(exact), part.to(exact), a.to(exact), alpha=scale))
    return result


@cache
def _readers(folder: str) -> dict[str, Any]:
    """Map each tensor of a checkpoint to the open file that has it, which is read when asked."""
    files = weight_files(Path(folder))
    opened = {path: safe_open(path, "pt") for path in set(files.values())}
    return {name: opened[path] for name, path in files.items()}
