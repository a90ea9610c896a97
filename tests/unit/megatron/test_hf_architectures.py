"""Configurations in Megatron's terms, and those that are refused: computed, they would be wrong."""

import math

import pytest
import torch
from transformers import AutoConfig

from areal_lite.config import LoraConfig, TrainerConfig
from areal_lite.data.model_folder import DELTA_NETS, check_split, num_experts
from areal_lite.megatron.architectures import (
    ARCHITECTURES,
    check_supported,
    transformer_config,
)
from areal_lite.megatron.attention import PackedAttention, rotations

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(architecture: str, **fields):
    return AutoConfig.for_model(architecture, **(SIZES | fields))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported(architecture):
    groups = 4 if architecture == "deepseek_v3" else 2
    hf = config(architecture, num_key_value_heads=groups)
    check_supported(hf, TrainerConfig(tensor_parallel=2))
    made = transformer_config(hf, torch.float32)
    assert made.num_query_groups == groups
    assert made.add_bias_linear == (architecture == "gpt_oss")
    assert made.add_qkv_bias == (architecture == "qwen2")  # GLM's default is without
    assert made.qk_layernorm == architecture.startswith(("qwen3", "gemma3"))
    assert (made.num_moe_experts is not None) == (num_experts(vars(hf)) > 0)
    assert made.attention_output_gate == (architecture in DELTA_NETS)


@pytest.mark.parametrize(
    "architecture, fields, message",
    [
        ("gpt2", {}, "model type 'gpt2' is not supported by the trainer: use one of qwen2, qwen3"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type default or llama3 or yarn",
        ),
        (
            "qwen3",
            {"rope_parameters": YARN | {"attention_factor": 1.3}},
            "attention_factor=1.3, but SGLang computes 1.138629",
        ),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                }
            },
            "for phi3: use rope_type default$",
        ),
        ("olmo3", {"head_dim": 32}, "head_dim=32 is not supported for olmo3"),
        ("glm4_moe", {"tie_word_embeddings": True}, "SGLang does not share them"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "without a gradient"),
        ("glm4_moe", {"n_group": 48}, "n_routed_experts=128 do not make up n_group=48"),
        ("glm4_moe", {"n_group": 128}, "groups of two experts or more"),
        ("gemma3_text", {"tie_word_embeddings": False}, "SGLang shares them"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"hidden_activation": "silu"}, "use a model with gelu_pytorch_tanh"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "SGLang stretches layers without a window only",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": YARN}},
            "for gemma3_text: use rope_type default or linear, over whole heads",
        ),
        ("gpt_oss", {"tie_word_embeddings": True}, "SGLang does not share them"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=false"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ("gpt_oss", {"num_experts_per_tok": 1}, "without a gradient"),
        ("deepseek_v3", {"tie_word_embeddings": True}, "for deepseek_v3, because SGLang"),
        ("deepseek_v3", {"num_key_value_heads": 1}, "its 4 heads have keys of their own"),
        ("deepseek_v3", {"num_key_value_heads": 4, "v_head_dim": 999}, "v_head_dim=999 are not"),
        ("deepseek_v3", {"num_key_value_heads": 4, "rope_interleave": False}, "=False and v_head"),
        ("llama", {"sliding_window": 8}, "sliding_window=8"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "over whole heads",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config says 'fp8'",
        ),
        (
            "qwen3",
            {"num_key_value_heads": 1},
            "num_key_value_heads=1 cannot be split over trainer.tensor_parallel=2",
        ),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 7},
            "moe_intermediate_size=7 cannot be split over trainer.tensor_parallel=2",
        ),
        (
            "qwen3_moe",
            {"tie_word_embeddings": True},
            "tie_word_embeddings=true is not supported for qwen3_moe",
        ),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "set norm_topk_prob to false",
        ),
        (
            "qwen3_moe",
            {"num_experts": 7},
            "7 experts a layer cannot be split over trainer.expert_parallel=2",
        ),
        (
            "qwen3_5_text",
            {"linear_num_key_heads": 3},
            "linear_num_key_heads=3 cannot be split over trainer.tensor_parallel=2",
        ),
        (
            "qwen3_5_text",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "for qwen3_5_text: use rope_type default$",
        ),
        ("qwen3_next", {"tie_word_embeddings": True}, "is not supported for qwen3_next"),
        ("qwen3", {}, "1 experts a layer cannot be split over trainer.expert_parallel=2"),
    ],
)
def test_refused(architecture, fields, message):
    with pytest.raises(ValueError, match=message):
        check_supported(
            config(architecture, **fields), TrainerConfig(tensor_parallel=2, expert_parallel=2)
        )


def test_multi_latent_attention_takes_no_adapters():
    hf = config("deepseek_v3", num_key_value_heads=4)
    with pytest.raises(ValueError, match="deepseek_v3 takes no adapters: set trainer.lora.rank"):
        check_supported(hf, TrainerConfig(lora=LoraConfig(rank=2)))


@pytest.mark.parametrize("mscale, scale", [(0.0, 1.0), (0.5, (1 + 0.05 * math.log(4)) ** 2)])
def test_yarn_changes_the_scale_of_deepseeks_scores(mscale, scale):
    rope = YARN | {"mscale": 0.5, "mscale_all_dim": mscale}
    hf = config("deepseek_v3", num_key_value_heads=4, rope_parameters=rope)
    made = transformer_config(hf, torch.float32)
    assert made.softmax_scale == pytest.approx(scale * 192**-0.5)


def test_states_do_not_pass_between_context_parallel_ranks():
    with pytest.raises(ValueError, match="qwen3_next passes states on: set trainer"):
        check_supported(config("qwen3_next"), TrainerConfig(context_parallel=2))


@pytest.mark.parametrize(
    "kind, remedy",
    [("qwen3_5", "AutoModelForCausalLM.from_"), ("gemma3", r".*load_state_dict\(whole.language")],
)
def test_images_are_not_trained(kind, remedy):
    described = AutoConfig.for_model(kind).to_dict()
    message = f"'{kind}' has a vision part, which is not trained: save its text model by {remedy}"
    with pytest.raises(ValueError, match=message):
        check_split(described, TrainerConfig())


def test_experts_may_be_split_over_tensor_parallel_ranks():
    hf = config("qwen3_moe")
    check_supported(hf, TrainerConfig(tensor_parallel=2))
    made = transformer_config(
        hf, torch.float32, tensor_model_parallel_size=2, sequence_parallel=True
    )
    assert made.num_moe_experts == 128


@pytest.mark.parametrize(
    "architecture, fields, windows",
    [
        ("mistral", {"sliding_window": 8}, [8, 8, 8, 8]),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("phi3", {"sliding_window": 8}, [8, 8, 8, 8]),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, [8, 8, 8, 8]),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, [None] * 4),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            [None, None, None, 8],
        ),
        ("smollm3", {"sliding_window": 8}, [None] * 4),
        ("olmo3", {"sliding_window": 8}, [8, 8, 8, None]),
    ],
)
def test_layers_have_the_windows_of_transformers(architecture, fields, windows):
    made = transformer_config(config(architecture, **fields), torch.float32)
    layers = [PackedAttention(made, number, None, "self") for number in (1, 2, 3, 4)]
    assert [layer.window for layer in layers] == windows


def test_smollm3_has_layers_without_a_rotation():
    made = transformer_config(config("smollm3"), torch.float32)
    layers = [PackedAttention(made, number, None, "self") for number in (1, 2, 3, 4)]
    assert [layer.rotates for layer in layers] == [True, True, True, False]


@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_are_those_of_transformers(head_dim):
    plain = config(
        "llama", head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    power = torch.arange(0, head_dim, 2).double() / head_dim
    (found,) = rotations(plain, torch.device("cpu"))
    torch.testing.assert_close(found.frequencies.double(), 5e5**-power, rtol=1e-6, atol=0)
    stretched = config("llama", head_dim=head_dim, rope_parameters=LLAMA3 | {"rope_theta": 1e4})
    ((got, factor),) = rotations(stretched, torch.device("cpu"))
    assert found.factor == factor == 1.0 and got.dtype == torch.float32
    # Llama 3.1: frequencies are kept above 4 turns in 64 positions, divided by 8 below 1.
    unstretched = 1e4**-power
    turns = 64 * unstretched / (2 * torch.pi)
    kept = ((turns - 1) / 3).clamp(0, 1)
    expected = unstretched * (kept + (1 - kept) / 8)
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=0)
    # Both ends are reached.
    assert (kept == 1).any() and (kept == 0).any()


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_is_that_of_its_paper(truncate):
    """Frequencies with more than 32 turns are kept, those with less than 1 are divided by 4."""
    rope = YARN | {"original_max_position_embeddings": 4096, "truncate": truncate}
    hf = config("llama", head_dim=128, rope_parameters=rope)
    ((got, factor),) = rotations(hf, torch.device("cpu"))
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    places = [64 * math.log(4096 / (2 * math.pi * turns)) / math.log(1e4) for turns in (32, 1)]
    low, high = (math.floor(places[0]), math.ceil(places[1])) if truncate else places
    ramp = ((torch.arange(64).double() - low) / (high - low)).clamp(0, 1)
    plain = 1e4 ** -(torch.arange(64).double() / 64)
    torch.testing.assert_close(got.double(), plain * (1 - ramp + ramp / 4), rtol=2e-6, atol=0)


def test_a_part_of_a_head_is_rotated():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    (found,) = rotations(config("phi3", rope_parameters=rope), torch.device("cpu"))
    assert found.frequencies.tolist() == pytest.approx([1e4 ** -(i / 4) for i in range(4)])


def test_gemma3_has_a_rotation_for_windows_and_one_for_all_other_layers():
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    both = {"full_attention": rope, "sliding_attention": {"rope_theta": 1e3}}
    hf = config("gemma3_text", head_dim=8, rope_parameters=both)
    full, windowed = rotations(hf, torch.device("cpu"))
    assert full.frequencies.tolist() == pytest.approx([1e6 ** -(i / 4) / 8 for i in range(4)])
    assert windowed.frequencies.tolist() == pytest.approx([1e3 ** -(i / 4) for i in range(4)])
    made = transformer_config(config("gemma3_text", query_pre_attn_scalar=64), torch.float32)
    assert made.softmax_scale == 1 / 8


def test_olmo3_stretches_layers_without_a_window_alone():
    full, windowed = rotations(config("olmo3", rope_parameters=YARN), torch.device("cpu"))
    _, plain = rotations(config("olmo3"), torch.device("cpu"))
    assert torch.equal(windowed.frequencies, plain.frequencies) and windowed.factor == 1.0
    assert not torch.equal(full.frequencies, plain.frequencies) and full.factor > 1.1
