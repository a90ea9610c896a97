"""Convert a trainer's checkpoint to the Hugging Face format, on one process and without a GPU."""

from pathlib import Path

import torch
from transformers import AutoConfig

from areal_lite.config import TrainerConfig
from areal_lite.megatron.checkpoint import load_weights, weights_dtype
from areal_lite.megatron.hf.export import SHARD_BYTES, export_hf
from areal_lite.megatron.hf.stream import WeightStream
from areal_lite.megatron.model import Chunks, build_chunks
from areal_lite.megatron.parallel import init_distributed, shutdown

_PART = "policy"


def convert(checkpoint: Path, source: Path, folder: Path, dtype: str) -> torch.dtype:
    """Write the policy in `checkpoint` to `folder`, and return the dtype of its weights.

    The checkpoint may be of any parallel layout. The call joins process groups of its own and
    leaves them, so it needs a process without any. Raises ValueError when the checkpoint is not of
    the model in `source`.

    Args:
        checkpoint: a folder step-N of a run.
        source: the Hugging Face folder from which the run started. Everything but the weights is
            copied from it.
        folder: where to write; it is replaced when the export is complete.
        dtype: of the weights; `auto` is that of the checkpoint.
    """
    trained = weights_dtype(checkpoint, _PART)
    wanted = trained if dtype == "auto" else getattr(torch, dtype)
    trainer = TrainerConfig(device="cpu")
    init_distributed(trainer, seed=0)
    try:
        hf = AutoConfig.from_pretrained(source, local_files_only=True)
        chunks = build_chunks(hf, trained, trainer, tie=hf.tie_word_embeddings)
        load_weights(checkpoint, _PART, Chunks(chunks))
        export_hf(WeightStream(chunks, hf).buckets(SHARD_BYTES), source, folder, wanted)
    finally:
        shutdown()
    return wanted
