"""The architectures that the trainer knows: a Hugging Face configuration -> Megatron's, and Megatron's parameters -> Hugging Face tensors.

One file each: which fields of Megatron's TransformerConfig it sets, and which tensors its layers have. A new one is such a file, and its
name in `ARCHITECTURES`. What would be computed wrongly is refused here (`check_supported`), before a model is built.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from transformers import PretrainedConfig

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


def check_supported(hf: PretrainedConfig, tensor_parallel: int, expert_parallel: int = 1) -> None:
    """Raise ValueError for a model that would be computed wrongly, or that cannot be split so many ways."""
    if hf.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model type {hf.model_type!r} is not supported by the trainer: use one of {', '.join(ARCHITECTURES)}"
        )
    ARCHITECTURES[hf.model_type].check(hf)
    check_rope(hf)
    if _has_window(hf):
        raise ValueError(
            f"sliding_window={hf.sliding_window} is not supported by the trainer: use a checkpoint without"
        )
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if getattr(hf, name, None):
            raise ValueError(
                f"{name}={getattr(hf, name)} is not supported by the trainer: use a checkpoint without"
            )
    if hf.hidden_act != "silu":
        raise ValueError(
            f"hidden_act={hf.hidden_act} is not supported by the trainer: only silu is"
        )
    for name in (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "moe_intermediate_size",
    ):
        if getattr(hf, name, 0) % tensor_parallel:
            raise ValueError(
                f"{name}={getattr(hf, name)} cannot be split over trainer.tensor_parallel={tensor_parallel}"
            )
    experts = getattr(hf, "num_experts", 1)
    if experts % expert_parallel:
        raise ValueError(
            f"a model with {experts} experts a layer cannot be split over trainer.expert_parallel={expert_parallel}"
        )


def _has_window(hf: PretrainedConfig) -> bool:
    """Whether some layer attends to fewer tokens than a sequence can have."""
    window, layers = getattr(hf, "sliding_window", None), getattr(hf, "layer_types", None)
    return (
        window is not None
        and window < hf.max_position_embeddings
        and (layers is None or "sliding_attention" in layers)
    )


def transformer_config(
    hf: PretrainedConfig, dtype: torch.dtype, **settings: Any
) -> TransformerConfig:
    """Megatron's description of the same network. `settings`: more of its fields, such as parallel sizes and recomputation.

    Raises ValueError for settings under which the network cannot be trained.
    """
    fields = ARCHITECTURES[hf.model_type].fields(hf)
    if (
        "num_moe_experts" in fields
        and settings.get("tensor_model_parallel_size", 1) > 1
        and not settings.get("sequence_parallel")
    ):
        raise ValueError(
            "trainer.sequence_parallel=false with trainer.tensor_parallel > 1 does not work with experts: set it to true"
        )
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
        # Gradients are summed, not averaged, over microbatches and data-parallel ranks: each loss is already a share of the whole.
        calculate_per_token_loss=True,
        **settings,
        **fields,
    )


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def layout(name: str, hf: PretrainedConfig) -> Parameter:
    """The Hugging Face tensors of the Megatron parameter `name`, whose layer and expert are counted over the whole model.

    A model with tied embeddings has an output layer only on a last pipeline stage that is not the first: a copy of the embedding.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return EMBEDDINGS[
            "embedding.word_embeddings.weight"
            if hf.tie_word_embeddings and name == "output_layer.weight"
            else name
        ]
    parameter = ARCHITECTURES[hf.model_type].layer[_EXPERT.sub("{expert}", layer[2])]
    expert = _EXPERT.search(layer[2])
    return type(parameter)(
        *(
            f"model.layers.{layer[1]}.{name}".format(expert=expert and expert[0])
            for name in parameter.names
        )
    )
