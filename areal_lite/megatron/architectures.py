"""The architectures that the trainer supports, translated into Megatron's terms.

To add one:

1. Add an entry to `ARCHITECTURES`, and its name to the tables of names in data/model_folder.py.
   A parameter that no other family has also needs its name and shape there.
2. Add its name to the choices of `architecture` in quickstart/command.py, which makes tiny models
   of it, with settings of its own in quickstart/make_model.py. Write docs/configuration.md again.
3. Add a model to `FAMILIES` in tests/ranks/test_families.py. It is then compared with transformers
   in each layout, with its server, and searched for leaks between sequences.
4. Name it in README.md and in the table of docs/training.md.
"""

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_lite.config import TrainerConfig
from areal_lite.config.rules import check_targets
from areal_lite.data.model_folder import (
    check_split,
    has_delta_net,
    has_window,
    layer_tensors,
    num_experts,
)
from areal_lite.megatron.kernels import gelu_tanh, quick_gelu
from areal_lite.megatron.parameters import (
    QKV,
    DeltaNet,
    GatedColumnParallel,
    GatedQKV,
    Parameter,
    Replicated,
    RowParallel,
    SplitVector,
    Stacked,
    StackedGate,
    StackedRowParallel,
    StackedVector,
    Untrained,
    VocabParallel,
    head_dim,
)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LIMIT = 7.0  # of gpt-oss's experts
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_QKV_WEIGHTS = [f"self_attn.{name}_proj.weight" for name in "qkv"]

Mapping = dict[str, Parameter]


def _gated_mlp(ours: str, theirs: str) -> Mapping:
    """Return the parameters of a gated MLP with these names in Megatron and in Hugging Face."""
    gate, up, down = (f"{theirs}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return {
        f"{ours}.linear_fc1.weight": GatedColumnParallel(gate, up),
        f"{ours}.linear_fc2.weight": RowParallel(down),
    }


# Once in a model.
EMBEDDINGS: Mapping = {
    "embedding.word_embeddings.weight": VocabParallel("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": Replicated("model.norm.weight"),
    "output_layer.weight": VocabParallel("lm_head.weight"),
}

# Below decoder.layers.{layer} in Megatron and model.layers.{layer} in Hugging Face.
INPUT_NORM: Mapping = {"input_layernorm.weight": Replicated("input_layernorm.weight")}
NORMS: Mapping = INPUT_NORM | {
    "pre_mlp_layernorm.weight": Replicated("post_attention_layernorm.weight")
}
# Of the results of attention and MLP, before these are added to the residual stream.
NORMS_AFTER: Mapping = {
    "self_attn_bda.weight": Replicated("post_attention_layernorm.weight"),
    "mlp_bda.weight": Replicated("post_feedforward_layernorm.weight"),
}
# Of what goes into attention and MLP, and of what comes out.
NORMS_AROUND: Mapping = (INPUT_NORM | NORMS_AFTER) | {
    "pre_mlp_layernorm.weight": Replicated("pre_feedforward_layernorm.weight")
}
ATTENTION: Mapping = {
    "self_attention.linear_qkv.weight": QKV(*_QKV_WEIGHTS),
    "self_attention.linear_proj.weight": RowParallel("self_attn.o_proj.weight"),
}
FUSED_QKV: Mapping = {"self_attention.linear_qkv.weight": QKV("self_attn.qkv_proj.weight")}
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
GATED_MLP = _gated_mlp("mlp", "mlp")
FUSED_GATE: Mapping = {"mlp.linear_fc1.weight": GatedColumnParallel("mlp.gate_up_proj.weight")}
EXPERTS: Mapping = _gated_mlp("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}") | {
    "mlp.router.weight": Replicated("mlp.gate.weight")
}
SHARED_EXPERT: Mapping = _gated_mlp("mlp.shared_experts", "mlp.shared_expert") | {
    "mlp.shared_experts.gate_weight": Replicated("mlp.shared_expert_gate.weight")
}
GATED_QKV: Mapping = {"self_attention.linear_qkv.weight": GatedQKV(*_QKV_WEIGHTS)}
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
    )
}

# A router of sigmoids chooses by them plus a bias. An MLP stands beside the experts.
GLM_EXPERTS: Mapping = (EXPERTS | _gated_mlp("mlp.shared_experts", "mlp.shared_experts")) | {
    "mlp.router.correction": Untrained("mlp.gate.e_score_correction_bias")
}
LATENT_ATTENTION: Mapping = {
    "self_attention.q_proj.weight": SplitVector("self_attn.q_proj.weight"),
    "self_attention.q_down": Replicated("self_attn.q_a_proj.weight"),
    "self_attention.q_norm.weight": Replicated("self_attn.q_a_layernorm.weight"),
    "self_attention.q_up.weight": SplitVector("self_attn.q_b_proj.weight"),
    "self_attention.kv_down": Replicated("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_norm.weight": Replicated("self_attn.kv_a_layernorm.weight"),
    "self_attention.kv_up.weight": SplitVector("self_attn.kv_b_proj.weight"),
    "self_attention.proj.weight": RowParallel("self_attn.o_proj.weight"),
}

SINKS: Mapping = {"self_attention.core_attention.heads.sinks": SplitVector("self_attn.sinks")}
PROJ_BIAS: Mapping = {"self_attention.linear_proj.bias": Replicated("self_attn.o_proj.bias")}
_EXPERT_FC1, _EXPERT_FC2 = (f"mlp.experts.local_experts.{{expert}}.linear_fc{i}" for i in (1, 2))
STACKED_EXPERTS: Mapping = {
    "mlp.router.weight": Replicated("mlp.router.weight"),
    "mlp.router.bias": Replicated("mlp.router.bias"),
    f"{_EXPERT_FC1}.weight": StackedGate("mlp.experts.gate_up_proj"),
    f"{_EXPERT_FC1}.bias": StackedGate("mlp.experts.gate_up_proj_bias"),
    f"{_EXPERT_FC2}.weight": StackedRowParallel("mlp.experts.down_proj"),
    f"{_EXPERT_FC2}.bias": StackedVector("mlp.experts.down_proj_bias"),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model type for the trainer."""

    layer: Mapping  # the parameters that its layers can have
    # The fields of Megatron's TransformerConfig that not every architecture sets.
    fields: Callable[[PretrainedConfig], dict[str, Any]] = lambda hf: {}
    # Raises ValueError for a model that SGLang would compute differently or that cannot train.
    check: Callable[[PretrainedConfig], None] = lambda hf: None
    # Frequencies are stretched in layers without a window only.
    plain_in_windows: bool = False
    centered: bool = False  # norms multiply by 1 + weight
    scaled_embedding: bool = False  # times the square root of its width

    def has(self, part: Mapping) -> bool:
        """Return whether its layers can have all of these parameters."""
        return part.items() <= self.layer.items()


def _check_experts(hf: PretrainedConfig) -> None:
    """Raise ValueError for shared embeddings, and for a router that would have no gradient."""
    if hf.tie_word_embeddings:
        raise ValueError(
            f"tie_word_embeddings=true is not supported for {hf.model_type}, because SGLang does"
            " not share them: use a checkpoint with an lm_head"
        )
    if getattr(hf, "norm_topk_prob", True) and hf.num_experts_per_tok == 1:
        remedy = ": set norm_topk_prob to false" if hf.model_type.startswith("qwen3") else ""
        raise ValueError(
            f"num_experts_per_tok=1 leaves the router of {hf.model_type} without a gradient{remedy}"
        )


def _check_qwen3_moe(hf: PretrainedConfig) -> None:
    _check_experts(hf)
    if hf.mlp_only_layers or hf.decoder_sparse_step != 1:
        raise ValueError(
            f"mlp_only_layers={hf.mlp_only_layers} and decoder_sparse_step="
            f"{hf.decoder_sparse_step} are not supported: SGLang has experts in every layer"
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
    described = {name: size for name, size in hf.to_dict().items() if name.startswith("linear_")}
    described["linear_attention_freq"] = [int(one) for one in has_delta_net(hf)]
    if hasattr(hf, "num_experts"):
        described |= _qwen3_moe(hf)
        described["moe_shared_expert_intermediate_size"] = hf.shared_expert_intermediate_size
        described["moe_shared_expert_gate"] = True
    return described | {"qk_layernorm": True, "attention_output_gate": True}


def _check_glm4_moe(hf: PretrainedConfig) -> None:
    _check_experts(hf)
    if not hf.norm_topk_prob:
        raise ValueError(
            f"norm_topk_prob=false is not supported for {hf.model_type}: SGLang ignores it"
        )
    if hf.n_routed_experts % hf.n_group or hf.n_routed_experts < 2 * hf.n_group:
        raise ValueError(
            f"n_routed_experts={hf.n_routed_experts} do not make up n_group={hf.n_group} groups of"
            " two experts or more: copy config.json again"
        )


def _glm4_moe(hf: PretrainedConfig) -> dict[str, Any]:
    dense = min(hf.first_k_dense_replace, hf.num_hidden_layers)
    return {
        "qk_layernorm": getattr(hf, "use_qk_norm", False),
        "add_qkv_bias": hf.attention_bias,
        "num_moe_experts": hf.n_routed_experts,
        "moe_layer_freq": [0] * dense + [1] * (hf.num_hidden_layers - dense),
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": hf.n_group,
        "moe_router_group_topk": hf.topk_group,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
    }


def _check_deepseek_v3(hf: PretrainedConfig) -> None:
    _check_glm4_moe(hf)
    if hf.num_key_value_heads != hf.num_attention_heads:
        raise ValueError(
            f"num_key_value_heads={hf.num_key_value_heads} is not supported for deepseek_v3: its"
            f" {hf.num_attention_heads} heads have keys of their own"
        )
    if not hf.rope_interleave or hf.v_head_dim > hf.qk_head_dim:
        raise ValueError(
            f"rope_interleave={hf.rope_interleave} and v_head_dim={hf.v_head_dim} are not supported"
            f" for deepseek_v3: use true, and at most {hf.qk_head_dim}"
        )


def _deepseek_v3(hf: PretrainedConfig) -> dict[str, Any]:
    """Describe experts as in GLM, and the scale, which YaRN changes (arXiv:2309.00071)."""
    rope, stretch = hf.rope_parameters, 1.0
    if rope.get("rope_type", "default") == "yarn" and rope["factor"] > 1:
        stretch += 0.1 * (rope.get("mscale_all_dim") or 0) * math.log(rope["factor"])
    return _glm4_moe(hf) | {"softmax_scale": hf.qk_head_dim**-0.5 * stretch**2}


def _check_olmo3(hf: PretrainedConfig) -> None:
    if head_dim(hf) * hf.num_attention_heads != hf.hidden_size:
        raise ValueError(
            f"head_dim={head_dim(hf)} is not supported for olmo3: SGLang takes hidden_size /"
            " num_attention_heads"
        )


def _check_gpt_oss(hf: PretrainedConfig) -> None:
    _check_experts(hf)
    if not hf.attention_bias:
        raise ValueError("attention_bias=false is not supported for gpt_oss: use a model with it")
    if (limit := getattr(hf, "swiglu_limit", _LIMIT)) != _LIMIT:
        raise ValueError(f"swiglu_limit={limit} is not supported for gpt_oss: it is {_LIMIT}")


def _gpt_oss(hf: PretrainedConfig) -> dict[str, Any]:
    return {
        "softmax_type": "learnable",
        "activation_func": quick_gelu,
        "activation_func_clamp_value": _LIMIT,
        "glu_linear_offset": 1.0,
        "num_moe_experts": hf.num_local_experts,
        "moe_ffn_hidden_size": hf.intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
    }


def _check_gemma3(hf: PretrainedConfig) -> None:
    if not hf.tie_word_embeddings:
        raise ValueError("tie_word_embeddings=false with gemma3_text: SGLang shares them")
    caps = "final_logit_softcapping", "attn_logit_softcapping"
    for name in (*caps, "use_bidirectional_attention"):
        if value := getattr(hf, name):
            raise ValueError(f"{name}={value} is not supported for gemma3_text: set it to null")
    if (rope := hf.rope_parameters["sliding_attention"])["rope_type"] != "default":
        raise ValueError(
            f"rope_parameters of sliding_attention, {rope}, are not supported for gemma3_text:"
            " SGLang stretches layers without a window only"
        )


def _check_yarn(hf: PretrainedConfig) -> None:
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
    layer = NORMS | ATTENTION | GATED_QKV | QK_NORM | net | mlp
    return Architecture(layer=layer, fields=_delta_net, centered=True, **options)


ARCHITECTURES = {
    # Qwen2 and Qwen2.5: biases on queries, keys and values.
    "qwen2": Architecture(
        layer=NORMS | ATTENTION | QKV_BIAS | GATED_MLP, fields=lambda hf: {"add_qkv_bias": True}
    ),
    # Dense: RMSNorm over the queries and keys of each head.
    "qwen3": Architecture(
        layer=NORMS | ATTENTION | QK_NORM | GATED_MLP, fields=lambda hf: {"qk_layernorm": True}
    ),
    # A token goes to the experts with the largest router probabilities, in every layer.
    "qwen3_moe": Architecture(
        layer=NORMS | ATTENTION | QK_NORM | EXPERTS, fields=_qwen3_moe, check=_check_qwen3_moe
    ),
    # GLM-4.5 and later: the first layers are dense.
    "glm4_moe": Architecture(
        layer=NORMS | ATTENTION | QKV_BIAS | QK_NORM | GATED_MLP | GLM_EXPERTS,
        fields=_glm4_moe,
        check=_check_glm4_moe,
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
    "phi3": Architecture(layer=NORMS | ATTENTION | FUSED_QKV | GATED_MLP | FUSED_GATE),
    # Without qk_layernorm, with which Megatron would sum the gradients of different heads' weights.
    "olmo3": Architecture(
        layer=NORMS_AFTER | ATTENTION | WIDE_QK_NORM | GATED_MLP,
        check=_check_olmo3,
        plain_in_windows=True,
    ),
    # DeepSeek-V3, and Moonlight, which does not compress queries.
    "deepseek_v3": Architecture(
        layer=NORMS | LATENT_ATTENTION | GATED_MLP | GLM_EXPERTS,
        fields=_deepseek_v3,
        check=_check_deepseek_v3,
    ),
    # Queries also attend to a sink without a value; experts have limits and biases.
    "gpt_oss": Architecture(
        layer=NORMS | ATTENTION | QKV_BIAS | PROJ_BIAS | SINKS | STACKED_EXPERTS,
        fields=_gpt_oss,
        check=_check_gpt_oss,
    ),
    "gemma3_text": Architecture(
        layer=NORMS_AROUND | ATTENTION | QK_NORM | GATED_MLP,
        fields=lambda hf: {
            "qk_layernorm": True,
            "activation_func": gelu_tanh,
            "softmax_scale": hf.query_pre_attn_scalar**-0.5,
        },
        check=_check_gemma3,
        centered=True,
        scaled_embedding=True,
    ),
    "qwen3_next": _with_nets(
        DELTA_NET | PACKED_INPUT, EXPERTS | SHARED_EXPERT, check=_check_qwen3_moe
    ),
    "qwen3_5_text": _with_nets(DELTA_NET, GATED_MLP),
    "qwen3_5_moe_text": _with_nets(DELTA_NET, EXPERTS | SHARED_EXPERT),
}


def check_supported(hf: PretrainedConfig, trainer: TrainerConfig) -> None:
    """Raise ValueError for a model that would be computed wrongly or cannot be split this way."""
    check_split(hf.to_dict(), TrainerConfig())  # on one rank
    ARCHITECTURES[hf.model_type].check(hf)
    if full_rope(hf).get("rope_type") == "yarn":
        _check_yarn(hf)
    check_split(hf.to_dict(), trainer)
    check_targets(trainer.lora, has_experts=num_experts(vars(hf)) > 0)


def full_rope(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the rotary parameters of layers without a window."""
    return hf.rope_parameters.get("full_attention", hf.rope_parameters)


def transformer_config(
    hf: PretrainedConfig, dtype: torch.dtype, **settings: Any
) -> TransformerConfig:
    """Describe the network in Megatron's terms; `settings` are further fields."""
    family = ARCHITECTURES[hf.model_type]
    own: dict[str, Any] = {"activation_func": F.silu} | family.fields(hf)
    if any(windows := has_window(hf)):
        own["window_size"] = (hf.sliding_window - 1, 0)
        own["window_attn_skip_freq"] = [int(one) for one in windows]
    made = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=getattr(hf, "intermediate_size", hf.hidden_size),
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
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
        **own,
    )
    # Given before, Megatron refuses to split experts with biases, which ours may be.
    made.add_bias_linear = family.has(PROJ_BIAS)
    return made


def described(hf: PretrainedConfig) -> dict[str, Any]:
    """Return what config.json says, as the functions of data/model_folder.py read it."""
    return vars(hf) | {"model_type": hf.model_type, "head_dim": head_dim(hf)}


def layer_mapping(hf: PretrainedConfig, layer: int) -> Mapping:
    """Return the parameters of a layer, counted from 0: those whose tensors the layer has."""
    tensors = set(layer_tensors(described(hf), layer, has_net=has_delta_net(hf)[layer]))
    possible = ARCHITECTURES[hf.model_type].layer
    return {name: each for name, each in possible.items() if tensors.issuperset(each.names)}


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
    parameter = ARCHITECTURES[hf.model_type].layer[EXPERT.sub("{expert}", layer[2])]
    expert = EXPERT.search(layer[2])
    tensors = (
        f"model.layers.{layer[1]}.{tensor}".format(expert=expert and expert[0])
        for tensor in parameter.names
    )
    plan = type(parameter)(*tensors)
    if isinstance(plan, Stacked):
        assert expert is not None
        plan.expert = int(expert[0])
    return plan
