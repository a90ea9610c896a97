"""Adapters added on a server, against float64."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from areal_lite.sglang_plugins import push as push_plugin
from areal_lite.sglang_plugins.push import adapted_weights

SHAPES = {"layers.0.q_proj": (24, 16), "layers.0.k_proj": (8, 16), "layers.1.down_proj": (16, 40)}
RANK, SCALE = 3, 1.7


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A checkpoint with random weights in three files."""
    torch.manual_seed(1)
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in SHAPES.items()}
    for number, (name, weight) in enumerate(weights.items()):
        save_file({name: weight}, tmp_path / f"model-{number}.safetensors")
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(weights)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return str(tmp_path)


def adapters(dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    """Return A of all weights before B of all, as the trainer sends fused projections."""
    sizes = {}
    for factor in ("A", "B"):
        for name, (rows, columns) in SHAPES.items():
            sizes[f"{name}.lora_{factor}.weight"] = (
                (RANK, columns) if factor == "A" else (rows, RANK)
            )
    return [(name, torch.randn(size, dtype=dtype)) for name, size in sizes.items()]


@pytest.mark.parametrize("rows_at_a_time", [2**24, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_exact_up_to_one_rounding(folder, monkeypatch, dtype, rows_at_a_time) -> None:
    monkeypatch.setattr(push_plugin, "_AT_A_TIME", rows_at_a_time)
    tensors = adapters(dtype)
    factors = {name: tensor.double() for name, tensor in tensors}
    found = dict(adapted_weights(tensors, folder, SCALE))
    assert found.keys() == {f"{name}.weight" for name in SHAPES}
    for name, weight in found.items():
        stem = name.removesuffix(".weight")
        base = push_plugin._readers(folder)[name].get_tensor(name).to(dtype).double()
        a, b = factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"]
        assert weight.dtype == dtype
        exact = base + SCALE * b @ a
        # Half an ulp of the result, and the rounding of each float32 operation before it.
        operations = RANK + 2
        bound = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(torch.float32).eps / 2 * (
            operations * (base.abs() + SCALE * b.abs() @ a.abs())
        )
        assert ((weight.double() - exact).abs() <= bound).all()


def test_adapters_of_another_model_are_refused(folder) -> None:
    a, b = torch.zeros(RANK, 16), torch.zeros(25, RANK)
    unknown = [("layers.9.q_proj.lora_A.weight", a), ("layers.9.q_proj.lora_B.weight", b)]
    with pytest.raises(ValueError, match="has no layers.9.q_proj.weight"):
        list(adapted_weights([*adapters(), *unknown], folder, SCALE))
    larger = [("layers.0.q_proj.lora_A.weight", a), ("layers.0.q_proj.lora_B.weight", b)]
    with pytest.raises(ValueError, match=r"shape \[24, 16\], and its adapter is for \[25, 16\]"):
        list(adapted_weights(larger, folder, SCALE))
