"""The architectures that the trainer supports, translated into Megatron's terms.

families.py has the table of models, and parameters.py how ranks share a parameter.
"""

import math
import re
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.config import TrainerConfig
from areal_lite.data.model_folder import check_split
from areal_lite.megatron.architectures.families import ARCHITECTURES, EMBEDDINGS
from areal_lite.megatron.architectures.parameters import Parameter, head_dim, padded_vocab

__all__ = [
    "ARCHITECTURES",
    "check_supported",
    "head_dim",
    "inverse_frequencies",
    "layout",
    "padded_vocab",
    "transformer_config",
]

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
    _check_rope(hf)
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


def _check_rope(hf: PretrainedConfig) -> None:
    """Raise ValueError for a rotary embedding that would be computed wrongly."""
    rope = hf.rope_parameters
    known = rope.get("rope_type", "default") in ("default", "llama3")
    if not known or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope_parameters {rope} are not supported by the trainer:"
            " use rope_type default or llama3, over whole heads"
        )


def inverse_frequencies(hf: PretrainedConfig, device: torch.device) -> Tensor:
    """Compute the rotary frequencies (Su et al., 2021, arXiv:2104.09864): float32 [head_dim / 2].

    Plain ones are theta^(-2i / head_dim), in radians per position.
    """
    dim = head_dim(hf)
    rope = hf.rope_parameters
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    plain = 1.0 / rope["rope_theta"] ** exponents
    return _llama3(plain, rope) if rope.get("rope_type") == "llama3" else plain


def _llama3(plain: Tensor, rope: dict) -> Tensor:
    """Stretch frequencies as Llama 3.1 does: divide low ones by `factor` and keep high ones.

    A frequency is low when it makes fewer than `low_freq_factor` turns within the context of
    pre-training, and high above `high_freq_factor`. In between the two results are mixed in
    proportion to the number of turns.
    """
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / (2 * math.pi / plain)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * plain / rope["factor"] + keep * plain
