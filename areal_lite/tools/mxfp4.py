"""Write a checkpoint of gpt-oss in bfloat16: `python -m areal_lite.tools.mxfp4 FOLDER NEW_FOLDER`.

The released checkpoints have their experts in MXFP4 (OCP Microscaling Formats 1.0): 32 numbers of
four bits share a power of two. A file has matrices as [experts, out, in / 32, 16] bytes of two
numbers, the lower bits first, and scales [experts, out, in / 32], whose exponents are 127 less.
Training changes the numbers, and pushes send them to servers: both need them in bfloat16.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

import areal_lite.megatron  # noqa: F401  (prepares megatron.core)
from areal_lite.data.model_folder import weight_files
from areal_lite.megatron.hf import SHARD_BYTES, Bucket, export_hf

_BLOCKS, _SCALES = "_blocks", "_scales"
_NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of `blocks`, uint8 [..., n, 16], times 2^(scales - 127): [..., 32 n]."""
    numbers = torch.tensor(_NUMBERS + [-x for x in _NUMBERS], dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1)
    return torch.ldexp(numbers[pairs.int()].flatten(-2), scales[..., None].int() - 127).flatten(-2)


def buckets(folder: Path, size: int) -> Iterator[Bucket]:
    """Read the tensors of a folder, experts in bfloat16, in buckets of about `size` bytes."""
    files, bucket = weight_files(folder), []
    for name in files:
        if name.endswith(_SCALES):
            continue
        tensor = _read(files, name)
        if name.endswith(_BLOCKS):
            name = name.removesuffix(_BLOCKS)
            # Expert by expert, which takes less memory.
            parts = zip(tensor, _read(files, name + _SCALES), strict=True)
            tensor = torch.stack([decode(*part).to(torch.bfloat16).t() for part in parts])
        bucket.append((name, tensor))
        if sum(each.nbytes for _, each in bucket) >= size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _read(files: dict[str, Path], name: str) -> Tensor:
    with safe_open(files[name], "pt") as reader:
        return reader.get_tensor(name)


def main(arguments: list[str]) -> None:
    """Convert a folder, as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("new_folder", type=Path)
    given = parser.parse_args(arguments)
    if given.new_folder.exists():
        parser.error(f"{given.new_folder} exists already: remove it or choose another folder")
    try:
        found = buckets(given.folder, SHARD_BYTES)
        export_hf(found, given.folder, given.new_folder, torch.bfloat16)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
