"""Configurations in Megatron's terms, and those that are refused: computed, they would be wrong."""

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_lite.config import TrainerConfig
from areal_lite.megatron.architectures import (
    check_supported,
    inverse_frequencies,
    transformer_config,
)

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


def config(architecture: str, **fields):
    return AutoConfig.for_model(architecture, **(SIZES | fields))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe"])
def test_supported(architecture):
    hf = config(architecture, **({"sliding_window": None} if architecture == "mistral" else {}))
    check_supported(hf, TrainerConfig(tensor_parallel=2))
    made = transformer_config(hf, torch.float32)
    assert made.num_query_groups == 2 and not made.add_bias_linear
    assert made.add_qkv_bias == (architecture == "qwen2")
    assert made.qk_layernorm == architecture.startswith("qwen3")
    assert (made.num_moe_experts is not None) == (architecture == "qwen3_moe")


@pytest.mark.parametrize(
    "architecture, fields, message",
    [
        ("gpt2", {}, "model type 'gpt2' is not supported by the trainer: use one of qwen2, qwen3"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type default or llama3",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "over whole heads",
        ),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ("mistral", {}, "sliding_window=4096"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "sliding_window=8",
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "sliding_window=8",
        ),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window=8"),
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
            "num_experts_per_tok=1 with norm_topk_prob=true",
        ),
        (
            "qwen3_moe",
            {"num_experts": 7},
            "7 experts a layer cannot be split over trainer.expert_parallel=2",
        ),
        ("qwen3", {}, "1 experts a layer cannot be split over trainer.expert_parallel=2"),
    ],
)
def test_refused(architecture, fields, message):
    with pytest.raises(ValueError, match=message):
        check_supported(
            config(architecture, **fields), TrainerConfig(tensor_parallel=2, expert_parallel=2)
        )


def test_experts_may_be_split_over_tensor_parallel_ranks():
    hf = config("qwen3_moe")
    check_supported(hf, TrainerConfig(tensor_parallel=2))
    made = transformer_config(
        hf, torch.float32, tensor_model_parallel_size=2, sequence_parallel=True
    )
    assert made.num_moe_experts == 128


def test_a_window_that_no_sequence_fills_is_accepted():
    check_supported(
        config("mistral", sliding_window=128, max_position_embeddings=128), TrainerConfig()
    )
    # No layer of this one has the window.
    check_supported(
        config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=4),
        TrainerConfig(),
    )


@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_are_those_of_transformers(head_dim):
    plain = config(
        "llama", head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    power = torch.arange(0, head_dim, 2).double() / head_dim
    torch.testing.assert_close(
        inverse_frequencies(plain, torch.device("cpu")).double(), 5e5**-power, rtol=1e-6, atol=0
    )
    stretched = config("llama", head_dim=head_dim, rope_parameters=LLAMA3 | {"rope_theta": 1e4})
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](stretched, "cpu")
    got = inverse_frequencies(stretched, torch.device("cpu"))
    assert scale == 1.0 and got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    unstretched = 1e4 ** -power.float()
    # Both ends are reached.
    assert (got == unstretched).any()
    assert torch.isclose(got, unstretched / LLAMA3["factor"]).any()
