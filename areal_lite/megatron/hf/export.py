"""Write a checkpoint that transformers and SGLang load."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from areal_lite.megatron.hf.stream import Bucket
from areal_lite.run_dir.manifest import write_manifest
from areal_lite.system.files import new_folder

SHARD_BYTES = 4 << 30  # of one file
_INDEX = "model.safetensors.index.json"
# Files with other suffixes in a checkpoint folder are weights.
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")


def export_hf(buckets: Iterator[Bucket], source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights in `buckets`, a file for each; copy everything else from `source`.

    `folder` appears under its name when it is complete and on disk. Its manifest has the checksum
    of every file.
    """
    with new_folder(folder) as scratch:
        for path in source.iterdir():
            if path.suffix in _COPIED_SUFFIXES and path.name not in ("config.json", _INDEX):
                shutil.copy2(path, scratch / path.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_weights(buckets, scratch, dtype)
        write_manifest(scratch, {})


def _write_weights(buckets: Iterator[Bucket], folder: Path, dtype: torch.dtype) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets, 1):
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in bucket}
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # safetensors lets only the owner read, and a server may run as another user.
        shutil.copymode(folder / "config.json", folder / file)
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(t.nbytes for t in tensors.values())
    if len(set(weight_map.values())) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
