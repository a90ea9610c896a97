"""The substitutions fit the installed Megatron-core; a source that they do not fit is refused."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import areal_lite.megatron  # noqa: F401  # asks the device for its substitutions
from areal_lite.cpu.megatron import CPU_SUBSTITUTIONS, ONEDNN_SUBSTITUTIONS
from areal_lite.megatron import patches
from areal_lite.megatron.patches import (
    CHECKPOINT_FIXES,
    GATHER_FIXES,
    IMPORT_FIXES,
    TORCH_ADAMW_FIXES,
    adapt,
    substitutions,
)

DEVICE = CPU_SUBSTITUTIONS + ONEDNN_SUBSTITUTIONS
CPU = substitutions(DEVICE, transformer_engine=False, apex=False)
MODULES = sorted({module for substitution in CPU for module in substitution.counts})


def source_of(module: str) -> str:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    core = Path(spec.submodule_search_locations[0]) / "core"
    return core.joinpath(*module.split(".")).with_suffix(".py").read_text()


@pytest.mark.parametrize("substitution", CPU, ids=lambda s: s.name)
def test_each_substitution_matches_as_often_as_it_says(substitution):
    for module, count in substitution.counts.items():
        assert len(re.findall(substitution.pattern, source_of(module))) == count, module


@pytest.mark.parametrize("module", MODULES)
def test_adapted_modules_compile_and_keep_no_cuda(module):
    adapted = adapt(module, source_of(module), CPU)
    compile(adapted, module, "exec")
    assert not [
        s.name for s in CPU_SUBSTITUTIONS if module in s.counts and re.search(s.pattern, adapted)
    ]


def test_a_source_that_does_not_fit_is_refused():
    source = source_of("optimizer.clip_grads").replace("device='cuda'", "device=device", 1)
    with pytest.raises(
        ImportError, match="optimizer.clip_grads: 'device literal' matches 4 times, not 5.*0.16.1"
    ):
        adapt("optimizer.clip_grads", source, CPU)


@pytest.mark.parametrize("device", [None, DEVICE])
@pytest.mark.parametrize(
    ("transformer_engine", "apex", "expected"),
    [
        (True, False, CHECKPOINT_FIXES),
        (True, True, CHECKPOINT_FIXES),
        (False, True, CHECKPOINT_FIXES),
        (False, False, TORCH_ADAMW_FIXES + CHECKPOINT_FIXES),
    ],
)
def test_each_table_applies_where_it_says(device, transformer_engine, apex, expected):
    selected = substitutions(device, transformer_engine=transformer_engine, apex=apex)
    assert selected == IMPORT_FIXES + (device or ()) + expected + GATHER_FIXES


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_megatron_is_adapted_and_torch_is_not():
    from megatron.core.optimizer import clip_grads

    assert isinstance(clip_grads.__loader__, patches._Loader)
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 2.0)
    clip_grads.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=4.0)
    assert torch.allclose(parameter.grad, torch.full((4,), 0.5))
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_a_package_that_does_not_load_counts_as_absent(tmp_path, monkeypatch):
    """deep_ep is there, but one of its libraries is not."""
    (tmp_path / "deep_ep.py").write_text("raise OSError('libnvshmem.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    module = "transformer.moe.fused_a2a"
    loaded: dict = {"__name__": module}
    exec(compile(adapt(module, source_of(module), IMPORT_FIXES), module, "exec"), loaded)
    assert loaded["HAVE_DEEP_EP"] is False
    with pytest.raises(OSError):
        exec(compile(source_of(module), module, "exec"), {"__name__": module})


@pytest.mark.parametrize("found", [["transformer_engine"], ["transformer_engine", "apex"]])
def test_packages_with_untested_ways_are_named(monkeypatch, found):
    monkeypatch.setattr(patches.importlib.util, "find_spec", lambda name: name in found)
    finders = [one for one in sys.meta_path if not isinstance(one, patches._Finder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    with pytest.warns(UserWarning, match=f"uses {' and '.join(found)} here, with which .* not"):
        patches.install(None)
