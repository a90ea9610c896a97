"""Convert a trainer's checkpoint to the Hugging Face format, on one process and without a GPU."""

from pathlib import Path

import torch
from transformers import AutoConfig

from areal_lite.config import TrainerConfig
from areal_lite.megatron.checkpoint import load_weights, stored_lora, weights_dtype
from areal_lite.megatron.hf.adapter import export_adapter
from areal_lite.megatron.hf.export import SHARD_BYTES, export_hf
from areal_lite.megatron.hf.load import load_hf
from areal_lite.megatron.hf.stream import WeightStream
from areal_lite.megatron.model import Chunks, build_chunks
from areal_lite.megatron.parallel import init_distributed, shutdown

_PART = "policy"


def convert(
    checkpoint: Path, source: Path, folder: Path, dtype: str, adapter: bool = False
) -> torch.dtype:
    """Write the policy in `checkpoint` to `folder`, and return the dtype of its weights.

    Adapters are added to the weights, or written alone.

    The checkpoint may be of any parallel layout. The call joins process groups of its own and
    leaves them, so it needs a process without any. Raises ValueError when the checkpoint is not of
    the model in `source`, or has no adapters to write.

    Args:
        checkpoint: a folder step-N of a run.
        source: the Hugging Face folder from which the run started. Everything but the weights is
            copied from it.
        folder: where to write; it is replaced when the export is complete.
        dtype: of the weights; `auto` is that of the checkpoint.
        adapter: write the adapters alone, in PEFT's format.
    """
    lora = stored_lora(checkpoint, _PART)
    if adapter and not lora.rank:
        raise ValueError(
            f"{checkpoint}: this checkpoint has no adapters, so leave out adapter=true"
        )
    trained = weights_dtype(checkpoint, _PART)
    wanted = trained if dtype == "auto" else getattr(torch, dtype)
    trainer = TrainerConfig(device="cpu", lora=lora)
    init_distributed(trainer, seed=0)
    try:
        hf = AutoConfig.from_pretrained(source, local_files_only=True)
        chunks = build_chunks(hf, trained, trainer, tie=hf.tie_word_embeddings)
        if lora.rank and not adapter:
            load_hf(chunks, source, hf)
        load_weights(checkpoint, _PART, Chunks(chunks))
        if adapter:
            export_adapter(chunks, hf, lora, source, folder, wanted)
        else:
            export_hf(WeightStream(chunks, hf).buckets(SHARD_BYTES), source, folder, wanted)
    finally:
        shutdown()
    return wanted
