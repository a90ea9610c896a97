"""The architectures that the trainer supports, and their translation into Megatron's terms.

To add one:

1. Write `architectures/<name>.py` with an `Architecture`, and list it in `ARCHITECTURES` below.
   A parameter that no other architecture has also needs its size in `launch/memory.py`.
2. Add its name to the choices of `architecture` in `quickstart/command.py`, which makes tiny models
   of it. Settings that only it has go into `quickstart/make_model.py`. Then write
   docs/configuration.md again: `python -m areal_lite.tools.reference > docs/configuration.md`.
3. Add a model to `MODELS` and `RUNS` in tests/ranks/test_architectures.py, which compares it
   with transformers, and a case to `test_supported` in test_hf_architectures.py. The tests that run
   over `ARCHITECTURES`, such as test_hf_layouts.py, find it by themselves.
4. Name it in README.md and in docs/training.md.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from transformers import PretrainedConfig

from areal_lite.config import TrainerConfig
from areal_lite.data.model_folder import check_split
from areal_lite.megatron.architectures.common import EMBEDDINGS
from areal_lite.megatron.architectures.llama import LLAMA
from areal_lite.megatron.architectures.mistral import MISTRAL
from areal_lite.megatron.architectures.parameters import Parameter, head_dim, padded_vocab
from areal_lite.megatron.architectures.qwen2 import QWEN2
from areal_lite.megatron.architectures.qwen3 import QWEN3
from areal_lite.megatron.architectures.qwen3_moe import QWEN3_MOE
from areal_lite.megatron.architectures.rope import check_rope, inverse_frequencies

__all__ = [
    "ARCHITECTURES",
    "check_supported",
    "head_dim",
    "inverse_frequencies",
    "layout",
    "padded_vocab",
    "transformer_config",
]

ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL)
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def check_supported(hf: PretrainedConfig, trainer: TrainerConfig) -> None:
    """Raise ValueError for a model that would be computed wrongly or cannot be split this way."""
    if hf.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model type {hf.model_type!r} is not supported by the trainer:"
            f" use one of {', '.join(ARCHITECTURES)}"
        )
    ARCHITECTURES[hf.model_type].check(hf)
    check_rope(hf)
    for name in ("sliding_window", "attention_bias", "mlp_bias", "quantization_config"):
        value = getattr(hf, name, None)
        if _has_window(hf) if name == "sliding_window" else value:
            raise ValueError(
                f"{name}={value} is not supported by the trainer: use a checkpoint without it"
            )
    if hf.hidden_act != "silu":
        raise ValueError(
            f"hidden_act={hf.hidden_act} is not supported by the trainer: use a model with silu"
        )
    check_split(hf.to_dict(), trainer)


def _has_window(hf: PretrainedConfig) -> bool:
    """Return whether some layer attends to fewer tokens than a sequence can have."""
    window = getattr(hf, "sliding_window", None)
    layers = getattr(hf, "layer_types", None)
    return (
        window is not None
        and window < hf.max_position_embeddings
        and (layers is None or "sliding_attention" in layers)
    )


def transformer_config(
    hf: PretrainedConfig, dtype: torch.dtype, **settings: Any
) -> TransformerConfig:
    """Describe the network in Megatron's terms.

    settings: further fields, such as parallel sizes and recomputation.
    """
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Gradients are summed, not averaged, over microbatches and data-parallel ranks, because
        # each microbatch's loss is already its share of the global loss.
        calculate_per_token_loss=True,
        **settings,
        **ARCHITECTURES[hf.model_type].fields(hf),
    )


def layout(name: str, hf: PretrainedConfig) -> Parameter:
    """Return the Hugging Face tensors of a Megatron parameter and how they are split.

    name: Megatron's name, its layer and expert counted over the whole model.

    With tied embeddings an output layer exists only on a last pipeline stage that is not the
    first; it is a copy of the embedding.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        if hf.tie_word_embeddings and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        return EMBEDDINGS[name]
    parameter = ARCHITECTURES[hf.model_type].layer[_EXPERT.sub("{expert}", layer[2])]
    expert = _EXPERT.search(layer[2])
    tensors = (
        f"model.layers.{layer[1]}.{tensor}".format(expert=expert and expert[0])
        for tensor in parameter.names
    )
    return type(parameter)(*tensors)
