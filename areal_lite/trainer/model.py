"""A Hugging Face Qwen2 or Qwen3 configuration -> a Megatron-core GPT model.

The model is stock Megatron-core but for two parts of its layer specification: `RMSNorm` and `PackedAttention` (which also applies
the rotary embedding; Megatron's own would loop over the packed sequences). Weights are allocated, not initialised: they come from a
checkpoint.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.trainer.attention import PackedAttention, PackedSequences
from areal_lite.trainer.packing import MicroBatch

ARCHITECTURES = ("qwen2", "qwen3")


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight (Zhang & Sennrich, 2019, arXiv:1910.07467): the norm in float32, the product with the weight in x's dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=_device()))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def head_dim(hf: PretrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def check_supported(hf: PretrainedConfig, tensor_parallel: int) -> None:
    """Raise ValueError for a model that would be computed wrongly, or that cannot be split so many ways."""
    if hf.model_type not in ARCHITECTURES:
        raise ValueError(f"model type {hf.model_type!r} is not supported by the trainer: use one of {', '.join(ARCHITECTURES)}")
    rope = hf.rope_parameters
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"rope_parameters {rope} are not supported by the trainer: only plain rotary embedding is")
    if getattr(hf, "use_sliding_window", False):
        raise ValueError("sliding-window attention is not supported by the trainer: set use_sliding_window to false")
    if hf.hidden_act != "silu" or getattr(hf, "attention_bias", False):
        raise ValueError(f"hidden_act={hf.hidden_act} with attention_bias={getattr(hf, 'attention_bias', False)} is not a Qwen model")
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(hf, name) % tensor_parallel:
            raise ValueError(f"{name}={getattr(hf, name)} cannot be split over trainer.tensor_parallel={tensor_parallel}")


def transformer_config(hf: PretrainedConfig, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's description of the same network, for the parallel groups that exist."""
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
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        # Gradients are summed, not averaged, over microbatches and data-parallel ranks: each loss is already a share of the whole.
        calculate_per_token_loss=True,
    )


def build_model(hf: PretrainedConfig, dtype: torch.dtype) -> GPTModel:
    """This rank's part of the model, its weights not yet set. Raises ValueError for a model that is not supported."""
    check_supported(hf, parallel_state.get_tensor_model_parallel_world_size())
    config = transformer_config(hf, dtype)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="none",
    )
    _mark_split_weights(model)
    return model


def _mark_split_weights(model: GPTModel) -> None:
    """Megatron marks weights as split only while it initialises them; the gradient norm would count those of one rank only."""
    for module in model.modules():
        dim = 1 if isinstance(module, RowParallelLinear) else 0
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)) and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def inverse_frequencies(hf: PretrainedConfig, device: torch.device) -> Tensor:
    """float32 [head_dim / 2]: base^(-2i / head_dim)."""
    dim = head_dim(hf)
    return 1.0 / hf.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def forward_logits(model: torch.nn.Module, microbatch: MicroBatch, inv_freq: Tensor, dtype: torch.dtype) -> Tensor:
    """[t, V / tp]: logits of the token after each token of the microbatch, this rank's slice of the vocabulary."""
    packed = PackedSequences.build(microbatch, inv_freq, dtype)
    logits = model(
        input_ids=microbatch.tokens[None], position_ids=microbatch.position_ids[None], attention_mask=None, packed_seq_params=packed
    )
    return logits[0]
