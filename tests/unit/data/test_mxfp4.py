"""transformers writes an MXFP4 checkpoint in bfloat16, as docs/training.md says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from areal_lite.data.model_folder import check_weights
from areal_lite_quickstart import make_model
from areal_lite_quickstart.command import MakeModelConfig

TINY = dict(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=32)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Make a small model in the form of the released ones."""
    folder = tmp_path / "packed"
    options = {"architecture": "gpt_oss", "tie_embeddings": False}
    make_model.run(MakeModelConfig(out=str(folder), **options, **TINY))
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        shape = experts, outer, inner // 32
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(115, 130, shape, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config | quantised))
    return folder


def test_a_folder_in_bfloat16_has_what_transformers_computes_with(packed, tmp_path):
    with pytest.raises(ValueError, match="gpt_oss is quantised, .* bfloat16"):
        check_weights(packed)
    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(packed, **options)
    model.save_pretrained(tmp_path / "plain", save_original_format=False)
    check_weights(tmp_path / "plain")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    theirs = dict(model.named_parameters())
    assert ours.dtype == torch.bfloat16
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
