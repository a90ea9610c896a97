"""`make-model` writes what the trainer takes; the quickstart's model does not change."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from areal_lite.config import TrainerConfig, settings_of
from areal_lite.megatron.architectures import check_supported
from areal_lite_quickstart import make_model
from areal_lite_quickstart.command import EXPERTS, MakeModelConfig

TINY = dict(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=16)

UNTIED = ("qwen3_moe", "qwen3_next", "glm4_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("architecture", settings_of(MakeModelConfig)["architecture"].choices)
def test_the_trainer_takes_each_architecture(tmp_path, architecture):
    out = tmp_path / "model"
    make_model.run(
        MakeModelConfig(
            out=str(out),
            architecture=architecture,
            tie_embeddings=architecture not in UNTIED,
            **TINY,
        )
    )
    hf = AutoConfig.from_pretrained(out)
    assert hf.model_type == architecture
    check_supported(hf, TrainerConfig(tensor_parallel=2))
    weights = load_file(out / "model.safetensors")
    assert ("lm_head.weight" in weights) == (architecture in UNTIED)
    if architecture == "gpt_oss":
        experts = (
            weights[f"model.layers.1.mlp.experts.{name}_proj"] for name in ("down", "gate_up")
        )
        assert next(experts).std() < 0.6 * next(experts).std()
    elif architecture in EXPERTS:
        assert (
            weights["model.layers.1.mlp.experts.7.down_proj.weight"].std()
            < 0.6 * weights["model.layers.1.mlp.experts.7.up_proj.weight"].std()
        )


def test_the_default_is_a_qwen3_with_gpt2_residuals(tmp_path):
    make_model.run(MakeModelConfig(out=str(tmp_path / "model"), seed=3, **TINY))
    made = load_file(tmp_path / "model" / "model.safetensors")
    sizes = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(3)
    expected = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(made["model.embed_tokens.weight"]),
            tie_word_embeddings=True,
            initializer_range=0.09,
            pad_token_id=0,
            **sizes,
        )
    ).state_dict()
    for name, tensor in made.items():
        scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        assert torch.equal(tensor, expected[name] * scale), name


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"architecture": "qwen3_moe"}, "tie_embeddings=true with architecture=qwen3_moe"),
        ({"architecture": "qwen3_next"}, "tie_embeddings=true with architecture=qwen3_next"),
        ({"num_experts": 1}, "experts_per_token=2 of num_experts=1"),
        ({"num_heads": 3}, "num_heads=3 is not a multiple of num_kv_heads=2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_model.run(MakeModelConfig(out=str(tmp_path / "model"), **(TINY | fields)))
