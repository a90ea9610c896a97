"""A Hugging Face configuration -> a Megatron-core GPT model.

The model is stock Megatron-core but for two parts of its layer specification: `RMSNorm` and `PackedAttention` (which also applies
the rotary embedding; Megatron's own would loop over the packed sequences). Weights are allocated, not initialised: they come from a
checkpoint.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.config import TrainerConfig
from areal_lite.megatron.architectures import check_supported, padded_vocab, transformer_config
from areal_lite.megatron.attention import PackedAttention
from areal_lite.megatron.parallel import transformer_settings


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight (Zhang & Sennrich, 2019, arXiv:1910.07467): the norm in float32, the product with the weight in x's dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device())
        )
        self.weight.sequence_parallel = (
            config.sequence_parallel
        )  # then a rank has the gradient of its tokens only

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


def device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


class Backbone(GPTModel):
    """One chunk of layers, with the embedding below it and the output layer above it where it is the first or the last.

    Its output is hidden states, [l, 1, hidden] (l / tp of them with sequence parallelism), after the final norm where it is the last:
    what is made of them is up to a head, and logits never exist whole.
    """

    def _postprocess(self, hidden_states: Tensor, **_) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """[V / tp, hidden]: the output layer's weight, or the embedding's where they are one."""
        return (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )


class Chunks(torch.nn.ModuleList):
    """All chunks of this rank as one module, for checkpoints: their sharded tensors count layers over the whole model."""

    def sharded_state_dict(self, **options) -> dict[str, dict]:
        return {str(i): chunk.sharded_state_dict(**options) for i, chunk in enumerate(self)}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        for i, chunk in enumerate(self):
            chunk.load_state_dict(state[str(i)])


def check_layout(hf: PretrainedConfig, trainer: TrainerConfig) -> None:
    """Raise ValueError for a model that is not supported, or that cannot be split in this way."""
    check_supported(hf, trainer.tensor_parallel, trainer.expert_parallel)
    if (
        getattr(hf, "num_experts", 0)
        and trainer.tensor_parallel > 1
        and not trainer.sequence_parallel
    ):
        raise ValueError(
            "Megatron wants trainer.sequence_parallel=true for a model with experts and trainer.tensor_parallel > 1"
        )
    if hf.num_hidden_layers % (trainer.pipeline_parallel * trainer.virtual_pipeline):
        raise ValueError(
            f"{hf.num_hidden_layers} layers cannot be split over trainer.pipeline_parallel={trainer.pipeline_parallel}"
            f" x trainer.virtual_pipeline={trainer.virtual_pipeline}: make their product divide the layers"
        )


def build_chunks(
    hf: PretrainedConfig, dtype: torch.dtype, trainer: TrainerConfig, tie: bool
) -> Chunks:
    """This rank's chunks of the model, in order, their weights not yet set. `tie`: whether the output layer shares the embedding's weight.

    Raises ValueError for a model that is not supported, or that cannot be split in this way.
    """
    check_layout(hf, trainer)
    config = transformer_config(hf, dtype, **transformer_settings(trainer, dtype))
    stages = range(trainer.virtual_pipeline) if trainer.virtual_pipeline > 1 else [None]
    return Chunks(_build_chunk(hf, config, tie, stage) for stage in stages)


def _build_chunk(
    hf: PretrainedConfig, config: TransformerConfig, tie: bool, vp_stage: int | None
) -> Backbone:
    layers = [layer_spec(config)] * get_num_layers_to_build(config, vp_stage)
    model = Backbone(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=padded_vocab(hf, config.tensor_model_parallel_size),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=tie,
        position_embedding_type="none",
        vp_stage=vp_stage,
    )
    _mark_split_weights(model)
    return model


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Stock Megatron but for the norms and the attention; all layers are alike."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def _mark_split_weights(model: GPTModel) -> None:
    """Megatron marks weights as split only while it initialises them; the gradient norm would count those of one rank only."""
    for module in model.modules():
        dim = 1 if isinstance(module, RowParallelLinear) else 0
        if (
            isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding))
            and module.weight is not None
        ):
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)
