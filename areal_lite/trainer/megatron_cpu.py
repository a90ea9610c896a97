"""Megatron-core 0.16.1 on a machine without CUDA, and without Transformer Engine.

Megatron-core names CUDA devices in its source. `install()` puts an import hook in front of `megatron.core` that compiles the modules in
the tables below with those names replaced. Neither `torch` nor any installed file is touched.

* `CPU_SUBSTITUTIONS` apply where `torch.cuda.is_available()` is False. With CUDA the stock source runs.
* `ONEDNN_SUBSTITUTIONS` apply there too, if this torch was built with oneDNN.
* `TORCH_ADAMW_FIXES` repair checkpointing of `torch.optim.AdamW` inside the distributed optimizer. Megatron-core takes that optimizer
  wherever neither Transformer Engine nor Apex is installed, so they apply there, CUDA or not.

Every substitution says how often it must match. A source that matches differently (another version) raises ImportError.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Substitution:
    """Replace `pattern` by `replacement`; `counts` maps a module below megatron.core to the number of matches it must have."""

    name: str
    pattern: str
    replacement: str
    counts: dict[str, int]


CPU_SUBSTITUTIONS = (
    Substitution(
        "device literal",
        r"device\s*=\s*(['\"])cuda\1",
        "device='cpu'",
        {
            "distributed.param_and_grad_buffer": 1,
            "dist_checkpointing.strategies.state_dict_saver": 1,
            "optimizer.clip_grads": 5,
            "optimizer.optimizer": 4,
            "pipeline_parallel.schedules": 3,
            "utils": 6,
        },
    ),
    Substitution(
        "current device",
        r"torch\.cuda\.current_device\(\)",
        "torch.cpu.current_device()",
        {
            "distributed.distributed_data_parallel": 1,
            "distributed.param_and_grad_buffer": 3,
            "dist_checkpointing.strategies.async_utils": 2,
            "dist_checkpointing.strategies.state_dict_saver": 1,
            "optimizer.distrib_optimizer": 2,
            "optimizer.optimizer": 1,
            "tensor_parallel.layers": 8,
            "tensor_parallel.mappings": 5,
        },
    ),
    Substitution("move to the device", r"\.cuda\(\)", ".cpu()", {"optimizer.distrib_optimizer": 1}),
    Substitution(
        "tensor type name",
        r"'torch\.cuda\.(Float|Half|BFloat16)Tensor'",
        r"'torch.\1Tensor'",
        {"optimizer.clip_grads": 1, "optimizer.distrib_optimizer": 5, "optimizer.optimizer": 3},
    ),
    Substitution(
        "synchronize",
        r"torch\.cuda\.synchronize\(\)",
        "torch.cpu.synchronize()",
        {"dist_checkpointing.strategies.async_utils": 1, "dist_checkpointing.strategies.filesystem_async": 1},
    ),
    # On a CPU torch.compile costs more at start than these few fused operations ever give back.
    Substitution("jit fuser", r"(?m)^enable_jit_fuser\(\)", "disable_jit_fuser()", {"jit": 1}),
)

# oneDNN multiplies float32 matrices more than twice as fast as the MKL behind torch.matmul does on AMD, and as fast on Intel.
_ONEDNN = r'torch.ops.mkldnn._linear_pointwise({}, {}, None, "none", [], "")'
ONEDNN_SUBSTITUTIONS = (
    Substitution(
        "linear layer",
        r"output = torch\.matmul\(total_input, weight\.t\(\)\)",
        "output = " + _ONEDNN.format("total_input", "weight"),
        {"tensor_parallel.layers": 1},
    ),
    Substitution(
        "gradient of its input",
        r"grad_input = grad_output\.matmul\(weight\)\n\n        if ctx\.sequence_parallel",
        "grad_input = " + _ONEDNN.format("grad_output", "weight.t()") + r"\n\n        if ctx.sequence_parallel",
        {"tensor_parallel.layers": 1},
    ),
    Substitution(
        "gradient of its weight",
        r"grad_weight = grad_output\.t\(\)\.matmul\(total_input\)",
        "grad_weight = " + _ONEDNN.format("total_input.t()", "grad_output.t()") + ".t()",
        {"tensor_parallel.layers": 1},
    ),
)

TORCH_ADAMW_FIXES = (
    # A fresh AdamW has no state, hence no step.
    Substitution(
        "step of a fresh optimizer",
        r"(inner_state_dict\[\"state\"\]\.values\(\)\]\)\))\n(\s+)assert len\(steps\) == 1\n\s+step = steps\[0\]",
        r"\1\n\2assert len(steps) <= 1\n\2step = steps[0] if steps else 0",
        {"optimizer.distrib_optimizer": 1},
    ),
    # The checkpoint keeps one step for all parameters, not one tensor each.
    Substitution(
        "step is no parameter state",
        r"dst_tensors\[key\]\.copy_\(tensors\[key\]\)",
        'key == "step" or dst_tensors[key].copy_(tensors[key])',
        {"optimizer.distrib_optimizer": 1},
    ),
    # One tensor shared by all parameters would be advanced once per parameter.
    Substitution(
        "a step of its own for each parameter",
        r"(?m)s\[\"step\"\] = step$",
        's["step"] = step.clone()',
        {"optimizer.distrib_optimizer": 1},
    ),
)


def substitutions(cuda: bool, onednn: bool, fused_adam: bool) -> tuple[Substitution, ...]:
    """What must change on a machine with or without CUDA and oneDNN, with or without the fused Adam of Transformer Engine or Apex."""
    cpu = () if cuda else CPU_SUBSTITUTIONS + (ONEDNN_SUBSTITUTIONS if onednn else ())
    return cpu + (() if fused_adam else TORCH_ADAMW_FIXES)


def adapt(module: str, source: str, table: tuple[Substitution, ...]) -> str:
    """The source of `module` (named from below megatron.core) with `table` applied. Raises ImportError for a wrong number of matches."""
    for substitution in table:
        expected = substitution.counts.get(module, 0)
        if not expected:
            continue
        source, count = re.subn(substitution.pattern, substitution.replacement, source)
        if count != expected:
            raise ImportError(
                f"megatron.core.{module}: '{substitution.name}' matches {count} times, not {expected}:"
                " areal_lite needs megatron-core 0.16.1"
            )
    return source


@cache
def _active() -> tuple[Substitution, ...]:
    fused_adam = any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex"))
    return substitutions(torch.cuda.is_available(), torch.backends.mkldnn.is_available(), fused_adam)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str):
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        return compile(adapt(fullname.removeprefix("megatron.core."), source, _active()), path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: frozenset[str]):
        self.modules = modules

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Put the import hook in place, once. Raises ImportError when megatron.core is already imported, and so can no longer be adapted."""
    modules = frozenset(f"megatron.core.{module}" for substitution in _active() for module in substitution.counts)
    if not modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise ImportError("megatron.core was imported before areal_lite.trainer: import areal_lite.trainer first")
    sys.meta_path.insert(0, _Finder(modules))
