"""A Hugging Face configuration -> a Megatron-core GPT model.

The model is stock Megatron-core except for its norms, dense MLP and attention, which also applies
the rotary embedding (Megatron's own loops over the packed sequences), and linear layers with
adapters (lora.py). Weights are allocated but not initialized: they come from a checkpoint.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from transformers import PretrainedConfig

from areal_lite.config import LoraConfig, TrainerConfig
from areal_lite.data.model_folder import has_delta_net
from areal_lite.megatron.architectures import (
    ARCHITECTURES,
    INPUT_NORM,
    LATENT_ATTENTION,
    NORMS_AFTER,
    WIDE_QK_NORM,
    Architecture,
    check_supported,
    transformer_config,
)
from areal_lite.megatron.attention import LatentAttention, PackedAttention
from areal_lite.megatron.delta_net import GatedDeltaNet, SplitRows
from areal_lite.megatron.experts import Experts, MixtureOfExperts, RoutingReplay, sparse_layers
from areal_lite.megatron.kernels import gated, kernels
from areal_lite.megatron.lora import freeze_base, linear_layer
from areal_lite.megatron.parallel import (
    current_device,
    process_group,
    transformer_settings,
    whole_weight,
)
from areal_lite.megatron.parameters import padded_vocab

LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight (Zhang & Sennrich, 2019, arXiv:1910.07467).

    Both the norm and the product are computed in float32 and rounded once, as in SGLang.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = whole_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class CenteredNorm(RMSNorm):
    """x / rms(x) * (1 + weight), with the sum in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, 1 + self.weight.float(), self.eps)


class WideNorm(SplitRows):
    """RMSNorm over all heads together, of queries or keys [l, b, heads, dim].

    A tensor-parallel rank has a part of the heads and of the weight.
    """

    weight: Tensor

    def __init__(self, config: TransformerConfig, heads: int, hidden_size: int, eps: float, **_):
        super().__init__(config, weight=(heads * hidden_size,))
        self.eps, self.width = eps, heads * hidden_size

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(-2)
        if self.group.size() == 1:
            return kernels.rms_norm(rows, self.weight, self.eps).view_as(x)
        wide = rows.float()
        # Of all ranks, and so is its gradient.
        square = reduce_from_tensor_model_parallel_region(
            wide.square().sum(-1, keepdim=True), group=self.group
        )
        square = copy_to_tensor_model_parallel_region(square, group=self.group)
        scale = torch.rsqrt(square / self.width + self.eps)
        return (self.weight * (wide * scale)).to(x.dtype).view_as(x)


class NormedSum(RMSNorm):
    """residual + norm(x), for x of attention or of an MLP, in place of Megatron's residual + x."""

    def forward(self, training: bool, fused: bool):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._add

    def _add(self, x: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + super().forward(x[0])


class CenteredSum(NormedSum, CenteredNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """residual + norm(x) with a centered norm."""


class GatedMLP(MLP):
    """Megatron's dense MLP with a gate (arXiv:2002.05202). It keeps less for backward."""

    layers: MLPSubmodules

    def __init__(self, config: TransformerConfig):
        group = process_group(parallel_state.get_tensor_model_parallel_group())
        width = config.ffn_hidden_size
        super().__init__(config, self.layers, ffn_hidden_size=width, tp_group=group)

    def forward(self, hidden_states: Tensor, **_) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        projections, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(gated(projections, None, self.config.activation_func))


class Backbone(GPTModel):
    """One chunk of layers, with the embedding and the output layer where it is first and last.

    It returns hidden states [l / tp, 1, hidden], after the final norm where it is last. A head
    turns them into results, so logits never exist whole.
    """

    config: TransformerConfig
    # Of its routers, in a model that replays routes.
    replays: Sequence[RoutingReplay] = ()

    def _postprocess(self, hidden_states: Tensor, **_) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hidden_states

    def global_name(self, name: str) -> str:
        """Return the name of a parameter or module with the layer of the whole model."""
        if not (found := LAYER.search(name)):
            return name
        layer: Any = self.decoder.layers[int(found[0])]
        return LAYER.sub(str(layer.layer_number - 1), name)

    def matrices(self, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the matrices, or vectors, of a parameter by their names in the model.

        A parameter of experts has a matrix for each of them. `parameter` may also be its gradient.
        """
        owner = self.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Experts):
            yield from owner.single(self.global_name(name), parameter)
        else:
            yield self.global_name(name), parameter

    def output_weight(self) -> Tensor:
        """Return the output layer's weight, [V / tp, hidden]; the embedding's where it is tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None
        return weight


class Chunks(torch.nn.ModuleList):
    """All chunks of this rank as one module, for checkpoints.

    Their sharded tensors count layers over the whole model. Frozen parameters are left out.
    """

    def sharded_state_dict(self, **options) -> dict[str, dict]:
        state = {}
        chunk: Any
        for i, chunk in enumerate(self):
            whole = chunk.sharded_state_dict(**options)
            frozen = _frozen(chunk)
            state[str(i)] = {name: x for name, x in whole.items() if name not in frozen}
        return state

    def load_state_dict(self, state: dict[str, dict]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for i, chunk in enumerate(self):
            chunk.load_state_dict(state[str(i)], strict=not _frozen(chunk))


def _frozen(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def build_chunks(
    hf: PretrainedConfig, dtype: torch.dtype, trainer: TrainerConfig, tie: bool
) -> list[Backbone]:
    """Build this rank's chunks of the model, in order, without setting their weights.

    tie: whether the output layer shares the embedding's weight. Raises ValueError for a model that
    is not supported or cannot be split in this way.
    """
    check_supported(hf, trainer)
    config = transformer_config(hf, dtype, **transformer_settings(trainer, dtype))
    stages = range(trainer.virtual_pipeline) if trainer.virtual_pipeline > 1 else [None]
    return [_build_chunk(hf, config, trainer.lora, tie, stage) for stage in stages]


def _build_chunk(
    hf: PretrainedConfig,
    config: TransformerConfig,
    lora: LoraConfig,
    tie: bool,
    vp_stage: int | None,
) -> Backbone:
    family = ARCHITECTURES[hf.model_type]
    first = get_transformer_layer_offset(config, vp_stage)
    here = slice(first, first + get_num_layers_to_build(config, vp_stage))
    kinds = zip(has_delta_net(hf)[here], sparse_layers(config)[here], strict=True)
    layers = [_layer_spec(hf, config, lora, *kind) for kind in kinds]
    norm = CenteredNorm if family.centered else RMSNorm
    # Megatron's annotation admits ModuleSpec only; its code takes both.
    block: Any = TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)  # pyright: ignore[reportArgumentType]
    model = Backbone(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocab(hf, config.tensor_model_parallel_size),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=tie,
        position_embedding_type="none",
        vp_stage=vp_stage,
    )
    if family.scaled_embedding and model.pre_process:
        scale: Any = torch.tensor(hf.hidden_size**0.5, dtype=config.params_dtype)
        model.embedding.register_forward_hook(lambda _, args, output: scale * output)
    model.to(current_device())  # Megatron makes the gate of a shared expert in host memory
    _mark_split_weights(model)
    if lora.rank:
        freeze_base(model)
    return model


def _layer_spec(
    hf: PretrainedConfig, config: TransformerConfig, lora: LoraConfig, delta: bool, sparse: bool
) -> ModuleSpec:
    """Return Megatron's layer with our norms, attention or delta net, and dense MLP or experts.

    All layers of a kind are alike: attention finds out about its own layer (attention.py).
    """
    architecture = ARCHITECTURES[hf.model_type]
    norm = CenteredNorm if architecture.centered else RMSNorm
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer: Any = spec.submodules
    _set_norms(layer, config, architecture)
    # Megatron builds a layer's MLP from a class.
    if sparse:
        layer.mlp = MixtureOfExperts
    else:
        fc1, fc2 = linear_layer("fc1", lora), linear_layer("fc2", lora)
        layers = MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)
        layer.mlp = type(GatedMLP.__name__, (GatedMLP,), {"layers": layers})
    qkv, proj = linear_layer("qkv", lora), linear_layer("proj", lora)
    if delta:
        parts = {"in_proj": qkv, "out_proj": proj, "norm": RMSNorm}
        layer.self_attention = ModuleSpec(module=GatedDeltaNet, params=parts)
        return spec
    if architecture.has(LATENT_ATTENTION):
        parts = {"hf": hf, "proj": proj, "norm": RMSNorm}
        layer.self_attention = ModuleSpec(module=LatentAttention, params=parts)
        return spec
    attention = layer.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = qkv, proj
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if architecture.has(WIDE_QK_NORM):
        heads = {"q": config.num_attention_heads, "k": config.num_query_groups}
        for name, number in heads.items():
            norm = ModuleSpec(module=WideNorm, params={"heads": number})
            setattr(attention, f"{name}_layernorm", norm)
    return spec


def _set_norms(layer: Any, config: TransformerConfig, architecture: Architecture) -> None:
    norm, total = (CenteredNorm, CenteredSum) if architecture.centered else (RMSNorm, NormedSum)
    before = norm if architecture.has(INPUT_NORM) else IdentityOp
    layer.input_layernorm = layer.pre_mlp_layernorm = before
    if architecture.has(NORMS_AFTER):
        params = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        summed = ModuleSpec(module=total, params=params | {"config": config})
        layer.self_attn_bda = layer.mlp_bda = summed


def _mark_split_weights(model: GPTModel) -> None:
    """Mark weights as split, as Megatron does when it initializes them.

    Without the mark the gradient norm would count the weights of one rank only.
    """
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            if module.weight is not None:
                set_tensor_model_parallel_attributes(module.weight, True, dim, 1)
