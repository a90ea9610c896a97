"""The architectures that the trainer supports, translated into Megatron's terms.

To add one:

1. Add an entry to `ARCHITECTURES`, and its name to `MODEL_TYPES` and `WINDOWS` in
   data/model_folder.py. A parameter that no other family has also needs its name and shape there,
   and its size in tools/memory.py.
2. Add its name to the choices of `architecture` in quickstart/command.py, which makes tiny models
   of it, with settings of its own in quickstart/make_model.py. Write docs/configuration.md again.
3. Add a model to `FAMILIES` in tests/ranks/test_families.py. It is then compared with transformers
   in each layout, with its server, and searched for leaks between sequences.
4. Name it in README.md and in the table of docs/training.md.

Each kind of parameter knows its Hugging Face tensors (`names`; matrices are [out, in]), and

* `shard`: reads the part of one rank, and only that part, from the safetensors files,
* `join`: makes the Hugging Face tensors from the parts of all ranks. A part is not copied where
  that can be avoided, because a weight push would read and write it once more.

Both only move numbers, so a round trip returns the same bits.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_lite.config import TrainerConfig
from areal_lite.config.rules import check_targets
from areal_lite.data.model_folder import WINDOWS, check_split, has_delta_net, has_window

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


class Source(Protocol):
    """A tensor in a file, as `safe_open(...).get_slice(name)` returns it."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True)
class _Rows:
    """`size` rows of a source, from `start` on."""

    source: Source
    start: int
    size: int

    def get_shape(self) -> list[int]:
        return [self.size, *self.source.get_shape()[1:]]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        assert isinstance(index, slice)
        return self.source[self.start + index.start : self.start + index.stop]


def head_dim(hf: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def padded_vocab(hf: PretrainedConfig, tensor_parallel: int) -> int:
    """Round `vocab_size` up to a multiple of `tensor_parallel`: rows of embedding and output layer.

    Rows from `vocab_size` on are zero, are never exported, and must not count in a softmax.
    """
    return -(-hf.vocab_size // tensor_parallel) * tensor_parallel


class Parameter:
    """One Megatron parameter. Its `names` may hold `{expert}`, counted over the whole model."""

    replicated = False  # whether every rank holds all of it

    def __init__(self, *names: str):
        self.names = names

    def shard(
        self, hf: PretrainedConfig, sources: Sequence[Source], rank: int, ranks: int
    ) -> Tensor:
        """Read the part of tensor-parallel rank `rank` of `ranks` from the tensors `sources`."""
        raise NotImplementedError

    def join(self, hf: PretrainedConfig, shards: Sequence[Tensor]) -> list[Tensor]:
        """Make the Hugging Face tensors from the parts of all ranks, in order of rank."""
        raise NotImplementedError


class Replicated(Parameter):
    """One tensor, the same on all ranks."""

    replicated = True

    def shard(self, hf, sources, rank, ranks):
        return sources[0][:]

    def join(self, hf, shards):
        return list(shards[:1])


class SplitVector(Parameter):
    """One vector, split like the outputs of a matrix."""

    def shard(self, hf, sources, rank, ranks):
        return _outputs(sources[0], rank, ranks)

    def join(self, hf, shards):
        return [_cat(shards)]


class RowParallel(Parameter):
    """One matrix, split along its inputs."""

    def shard(self, hf, sources, rank, ranks):
        return sources[0][:, _span(sources[0].get_shape()[1], rank, ranks)]

    def join(self, hf, shards):
        return [_cat(shards, 1)]


class GatedColumnParallel(Parameter):
    """Gate and up projection, in two tensors or one; a rank stacks its outputs of each."""

    def shard(self, hf, sources, rank, ranks):
        if len(sources) == 1:
            half = sources[0].get_shape()[0] // 2
            sources = [_Rows(sources[0], start, half) for start in (0, half)]
        return torch.cat([_outputs(source, rank, ranks) for source in sources])

    def join(self, hf, shards):
        parts = [_cat(part) for part in zip(*(shard.chunk(2) for shard in shards))]
        return parts if len(self.names) == 2 else [torch.cat(parts)]


class Grouped(Parameter):
    """Tensors made of pieces. A group has its rows of every piece, and a rank has whole groups."""

    def groups(self, hf: PretrainedConfig) -> int:
        raise NotImplementedError

    def pieces(self, hf: PretrainedConfig) -> list[list[int]]:
        """Return the number of rows of each piece of each tensor."""
        raise NotImplementedError

    def shard(self, hf, sources, rank, ranks):
        groups, parts = self.groups(hf) // ranks, []
        for name, source, sizes in zip(self.names, sources, self.pieces(hf), strict=True):
            if (found := source.get_shape()[0]) != sum(sizes):
                raise ValueError(f"{name} has {found} rows, but config.json implies {sum(sizes)}")
            for each in zip(accumulate(sizes[:-1], initial=0), sizes):
                rows = _outputs(_Rows(source, *each), rank, ranks)
                parts.append(rows.unflatten(0, (groups, -1)))
        return torch.cat(parts, 1).flatten(0, 1)

    def join(self, hf, shards):
        groups, pieces = self.groups(hf), self.pieces(hf)
        rows = _cat(shards).unflatten(0, (groups, -1))
        parts = iter(rows.split([size // groups for sizes in pieces for size in sizes], 1))
        return [_cat([next(parts).flatten(0, 1) for _ in sizes]).contiguous() for sizes in pieces]


class QKV(Grouped):
    """Query, key and value projection: a group has queries, the key and the value that they see."""

    def groups(self, hf):
        return hf.num_key_value_heads

    def pieces(self, hf):
        queries = hf.num_attention_heads * head_dim(hf)
        keys = hf.num_key_value_heads * head_dim(hf)
        return [[queries], [keys], [keys]] if len(self.names) == 3 else [[queries, keys, keys]]


class GatedQKV(QKV):
    """With gates. In a file queries and gates alternate; Megatron has a group's queries first."""

    def pieces(self, hf):
        (queries,), *others = super().pieces(hf)
        return [[2 * queries], *others]

    def shard(self, hf, sources, rank, ranks):
        return self._reorder(hf, super().shard(hf, sources, rank, ranks), back=False)

    def join(self, hf, shards):
        return super().join(hf, [self._reorder(hf, _cat(shards), back=True)])

    def _reorder(self, hf: PretrainedConfig, rows: Tensor, *, back: bool) -> Tensor:
        """Exchange the two orders of the heads of each group."""
        ends = 2 * (hf.num_attention_heads // hf.num_key_value_heads)
        order = torch.tensor([*range(0, ends, 2), *range(1, ends, 2), ends, ends + 1])
        heads = rows.unflatten(0, (-1, len(order), head_dim(hf)))
        return heads[:, order.argsort() if back else order].flatten(0, 2)


class DeltaNet(Grouped):
    """Rows of a gated delta net, grouped by key head, in Qwen3-Next's file too (delta_net.py)."""

    def groups(self, hf):
        return hf.linear_num_key_heads

    def pieces(self, hf):
        heads, keys = hf.linear_num_value_heads, hf.linear_num_key_heads * hf.linear_key_head_dim
        values = heads * hf.linear_value_head_dim
        split = [[keys, keys, values], [values], [heads], [heads]]
        packed = [[2 * keys + 2 * values], [2 * heads]]
        return packed if len(self.names) == 2 else split[: len(self.names)]


class VocabParallel(Parameter):
    """One matrix [vocab_size, hidden], split along the vocabulary, padded as in `padded_vocab`."""

    def shard(self, hf, sources, rank, ranks):
        found = sources[0].get_shape()[0]
        if found != hf.vocab_size:
            raise ValueError(
                f"{self.names[0]} has {found} rows, but config.json says vocab_size={hf.vocab_size}"
            )
        size = padded_vocab(hf, ranks) // ranks
        end = min((rank + 1) * size, hf.vocab_size)
        rows = sources[0][min(rank * size, end) : end]
        return F.pad(rows, (0, 0, 0, size - len(rows)))

    def join(self, hf, shards):
        return [_cat(shards)[: hf.vocab_size]]


def _outputs(source: Source, rank: int, ranks: int) -> Tensor:
    return source[_span(source.get_shape()[0], rank, ranks)]


def _span(size: int, rank: int, ranks: int) -> slice:
    part, rest = divmod(size, ranks)
    if rest:
        raise ValueError(
            f"a checkpoint tensor of {size} rows or columns cannot be split over {ranks}"
            " tensor-parallel ranks"
        )
    return slice(rank * part, (rank + 1) * part)


def _cat(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(tuple(shards), dim)


Mapping = dict[str, Parameter]

# Once in a model.
EMBEDDINGS: Mapping = {
    "embedding.word_embeddings.weight": VocabParallel("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": Replicated("model.norm.weight"),
    "output_layer.weight": VocabParallel("lm_head.weight"),
}

# Below decoder.layers.{layer} in Megatron and model.layers.{layer} in Hugging Face.
NORMS: Mapping = {
    "input_layernorm.weight": Replicated("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": Replicated("post_attention_layernorm.weight"),
}
# Of the results of attention and MLP, before these are added to the residual stream.
NORMS_AFTER: Mapping = {
    "self_attn_bda.weight": Replicated("post_attention_layernorm.weight"),
    "mlp_bda.weight": Replicated("post_feedforward_layernorm.weight"),
}
ATTENTION: Mapping = {
    "self_attention.linear_qkv.weight": QKV(*(f"self_attn.{name}_proj.weight" for name in "qkv")),
    "self_attention.linear_proj.weight": RowParallel("self_attn.o_proj.weight"),
}
FUSED_QKV: Mapping = {
    "self_attention.linear_qkv.weight": QKV("self_attn.qkv_proj.weight"),
}
QKV_BIAS: Mapping = {
    "self_attention.linear_qkv.bias": QKV(*(f"self_attn.{name}_proj.bias" for name in "qkv"))
}
QK_NORM: Mapping = {
    "self_attention.q_layernorm.weight": Replicated("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": Replicated("self_attn.k_norm.weight"),
}
# RMSNorm over the queries of all heads, and over all keys.
WIDE_QK_NORM: Mapping = {
    "self_attention.q_layernorm.weight": SplitVector("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": SplitVector("self_attn.k_norm.weight"),
}
GATED_MLP: Mapping = {
    "mlp.linear_fc1.weight": GatedColumnParallel("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": RowParallel("mlp.down_proj.weight"),
}
FUSED_GATE: Mapping = {"mlp.linear_fc1.weight": GatedColumnParallel("mlp.gate_up_proj.weight")}
EXPERTS: Mapping = {
    "mlp.router.weight": Replicated("mlp.gate.weight"),
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": GatedColumnParallel(
        "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": RowParallel(
        "mlp.experts.{expert}.down_proj.weight"
    ),
}
SHARED_EXPERT: Mapping = {
    "mlp.shared_experts.linear_fc1.weight": GatedColumnParallel(
        "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": RowParallel("mlp.shared_expert.down_proj.weight"),
    "mlp.shared_experts.gate_weight": Replicated("mlp.shared_expert_gate.weight"),
}
GATED_QKV: Mapping = {
    "self_attention.linear_qkv.weight": GatedQKV(
        *(f"self_attn.{name}_proj.weight" for name in "qkv")
    ),
}
DELTA_NET: Mapping = {
    "self_attention.in_proj.weight": DeltaNet(
        *(f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
    ),
    "self_attention.heads.conv": DeltaNet("linear_attn.conv1d.weight"),
    "self_attention.heads.a_log": SplitVector("linear_attn.A_log"),
    "self_attention.heads.dt_bias": SplitVector("linear_attn.dt_bias"),
    "self_attention.norm.weight": Replicated("linear_attn.norm.weight"),
    "self_attention.out_proj.weight": RowParallel("linear_attn.out_proj.weight"),
}
PACKED_INPUT: Mapping = {
    "self_attention.in_proj.weight": DeltaNet(
        "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model type for the trainer."""

    layer: Mapping  # the parameters of one layer
    delta: Mapping = field(default_factory=dict)  # of a layer with a gated delta net
    # The fields of Megatron's TransformerConfig that not every architecture sets.
    fields: Callable[[PretrainedConfig], dict[str, Any]] = lambda hf: {}
    # Raises ValueError for a configuration that would be computed wrongly.
    check: Callable[[PretrainedConfig], None] = lambda hf: None
    rope_types: tuple[str, ...] = ("default", "llama3", "yarn")
    partial_rotary: bool = False  # it may rotate a part of each head
    # Frequencies are stretched in layers without a window only.
    plain_in_windows: bool = False
    centered: bool = False  # norms multiply by 1 + weight

    @property
    def norms_after(self) -> bool:
        """Return whether norms stand after attention and MLP, and not before them."""
        return NORMS_AFTER.keys() <= self.layer.keys()

    @property
    def wide_qk_norm(self) -> bool:
        """Return whether queries and keys have norms over all heads."""
        return WIDE_QK_NORM.items() <= self.layer.items()


def _check_qwen3_moe(hf: PretrainedConfig) -> None:
    """Raise ValueError for a model that SGLang would compute differently or that cannot train."""
    if hf.tie_word_embeddings:
        raise ValueError(
            f"tie_word_embeddings=true is not supported for {hf.model_type}, because SGLang does"
            " not share them: use a checkpoint with an lm_head"
        )
    if hf.mlp_only_layers or hf.decoder_sparse_step != 1:
        raise ValueError(
            f"mlp_only_layers={hf.mlp_only_layers} and decoder_sparse_step="
            f"{hf.decoder_sparse_step} are not supported: SGLang has experts in every layer"
        )
    if hf.norm_topk_prob and hf.num_experts_per_tok == 1:
        raise ValueError(
            "num_experts_per_tok=1 with norm_topk_prob=true leaves the router without a gradient:"
            " set norm_topk_prob to false"
        )


def _qwen3_moe(hf: PretrainedConfig) -> dict[str, Any]:
    """Describe the experts. There is no balancing loss: pre-training has balanced their load."""
    return {
        "qk_layernorm": True,
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        # The weights of the chosen experts are their probabilities among all experts (true), or
        # among the chosen ones, which then sum to 1 (false).
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
    }


def _delta_net(hf: PretrainedConfig) -> dict[str, Any]:
    """Describe layers with a gated delta net, attention with gates in the others, and experts."""
    described = {name: size for name, size in hf.to_dict().items() if name.startswith("linear_")}
    described["linear_attention_freq"] = [int(one) for one in has_delta_net(hf)]
    if hasattr(hf, "num_experts"):
        described |= _qwen3_moe(hf)
        described["moe_shared_expert_intermediate_size"] = hf.shared_expert_intermediate_size
    return described | {"qk_layernorm": True, "attention_output_gate": True}


def _check_olmo3(hf: PretrainedConfig) -> None:
    """Raise ValueError for heads of another width than SGLang computes."""
    if head_dim(hf) * hf.num_attention_heads != hf.hidden_size:
        raise ValueError(
            f"head_dim={head_dim(hf)} is not supported for olmo3: SGLang takes hidden_size /"
            " num_attention_heads"
        )


def _check_yarn(hf: PretrainedConfig) -> None:
    """Raise ValueError for numbers of YaRN that transformers and SGLang read differently."""
    given = hf.rope_parameters.get("attention_factor")
    computed = copy.deepcopy(hf)
    computed.rope_parameters["attention_factor"] = None
    scale = ROPE_INIT_FUNCTIONS["yarn"](computed, torch.device("cpu"))[1]
    if given is not None and abs(given - scale) > 1e-6:
        raise ValueError(
            f"rope_parameters has attention_factor={given}, but SGLang computes {scale:.7g} from"
            " its factor: remove attention_factor"
        )


def _with_nets(net: Mapping, mlp: Mapping, **options: Any) -> Architecture:
    """Return a family in which some layers have a gated delta net instead of attention."""
    layers = {"layer": NORMS | ATTENTION | GATED_QKV | QK_NORM | mlp, "delta": NORMS | net | mlp}
    options |= {"rope_types": ("default",), "partial_rotary": True, "centered": True}
    return Architecture(**layers, fields=_delta_net, **options)


ARCHITECTURES = {
    # Qwen2 and Qwen2.5: biases on queries, keys and values.
    "qwen2": Architecture(
        layer=NORMS | ATTENTION | QKV_BIAS | GATED_MLP,
        fields=lambda hf: {"add_qkv_bias": True},
    ),
    # Dense: RMSNorm over the queries and keys of each head.
    "qwen3": Architecture(
        layer=NORMS | ATTENTION | QK_NORM | GATED_MLP,
        fields=lambda hf: {"qk_layernorm": True},
    ),
    # A token goes to the experts with the largest router probabilities, in every layer.
    "qwen3_moe": Architecture(
        layer=NORMS | ATTENTION | QK_NORM | EXPERTS, fields=_qwen3_moe, check=_check_qwen3_moe
    ),
    # Llama 2 and 3. Llama 3.1 stretches low rotary frequencies.
    "llama": Architecture(layer=NORMS | ATTENTION | GATED_MLP),
    "mistral": Architecture(layer=NORMS | ATTENTION | GATED_MLP),
    # Every fourth layer has no rotary embedding.
    "smollm3": Architecture(
        layer=NORMS | ATTENTION | GATED_MLP,
        fields=lambda hf: {
            "no_rope_freq": [1 - rope for rope in hf.no_rope_layers[: hf.num_hidden_layers]]
        },
    ),
    # Phi-3 and Phi-4 in a file of fused matrices.
    "phi3": Architecture(
        layer=NORMS | ATTENTION | FUSED_QKV | GATED_MLP | FUSED_GATE,
        rope_types=("default",),
        partial_rotary=True,
    ),
    # Without qk_layernorm, with which Megatron would sum the gradients of different heads' weights.
    "olmo3": Architecture(
        layer=NORMS_AFTER | ATTENTION | WIDE_QK_NORM | GATED_MLP,
        check=_check_olmo3,
        plain_in_windows=True,
    ),
    "qwen3_next": _with_nets(
        DELTA_NET | PACKED_INPUT, EXPERTS | SHARED_EXPERT, check=_check_qwen3_moe
    ),
    "qwen3_5_text": _with_nets(DELTA_NET, GATED_MLP),
    "qwen3_5_moe_text": _with_nets(DELTA_NET, EXPERTS | SHARED_EXPERT),
}


def check_supported(hf: PretrainedConfig, trainer: TrainerConfig) -> None:
    """Raise ValueError for a model that would be computed wrongly or cannot be split this way."""
    if hf.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model type {hf.model_type!r} is not supported by the trainer:"
            f" use one of {', '.join(ARCHITECTURES)}"
        )
    known, rope = ARCHITECTURES[hf.model_type], hf.rope_parameters
    known.check(hf)
    kind = rope.get("rope_type", "default")
    partial = rope.get("partial_rotary_factor", 1.0) != 1.0
    if kind not in known.rope_types or (partial and not known.partial_rotary):
        raise ValueError(
            f"rope_parameters {rope} are not supported by the trainer for {hf.model_type}:"
            f" use rope_type {' or '.join(known.rope_types)}"
            + ("" if known.partial_rotary else ", over whole heads")
        )
    if kind == "yarn":
        _check_yarn(hf)
    names = ["attention_bias", "mlp_bias", "quantization_config"]
    for name in ["sliding_window", *names] if hf.model_type not in WINDOWS else names:
        if value := getattr(hf, name, None):
            raise ValueError(
                f"{name}={value} is not supported by the trainer: use a checkpoint without it"
            )
    if hf.hidden_act != "silu":
        raise ValueError(
            f"hidden_act={hf.hidden_act} is not supported by the trainer: use a model with silu"
        )
    check_split(hf.to_dict(), trainer)
    check_targets(trainer.lora, has_experts=getattr(hf, "num_experts", 0) > 0)


def transformer_config(
    hf: PretrainedConfig, dtype: torch.dtype, **settings: Any
) -> TransformerConfig:
    """Describe the network in Megatron's terms; `settings` are further fields."""
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=getattr(hf, "intermediate_size", hf.hidden_size),
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
        **_windows(hf),
        **ARCHITECTURES[hf.model_type].fields(hf),
    )


def _windows(hf: PretrainedConfig) -> dict[str, Any]:
    """Describe the windows of the layers."""
    if not any(found := has_window(hf)):
        return {}
    before = hf.sliding_window - 1
    return {"window_size": (before, 0), "window_attn_skip_freq": [int(one) for one in found]}


def layer_mapping(hf: PretrainedConfig, layer: int) -> Mapping:
    """Return the parameters of a layer, counted from 0."""
    family = ARCHITECTURES[hf.model_type]
    return family.delta if has_delta_net(hf)[layer] else family.layer


def layout(name: str, hf: PretrainedConfig) -> Parameter:
    """Return the Hugging Face tensors of a Megatron parameter and how they are split.

    `name` counts layer and expert over the whole model. With tied embeddings an output layer exists
    only on a last pipeline stage that is not the first; it is a copy of the embedding.
    """
    layer = _LAYER.fullmatch(name)
    if layer is None:
        if hf.tie_word_embeddings and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        return EMBEDDINGS[name]
    parameter = layer_mapping(hf, int(layer[1]))[_EXPERT.sub("{expert}", layer[2])]
    expert = _EXPERT.search(layer[2])
    tensors = (
        f"model.layers.{layer[1]}.{tensor}".format(expert=expert and expert[0])
        for tensor in parameter.names
    )
    return type(parameter)(*tensors)
