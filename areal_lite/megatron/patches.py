"""Megatron-core 0.16.1 on a machine without CUDA, and without Transformer Engine.

Megatron-core names CUDA devices in its source. `install()` puts an import hook in front of `megatron.core` that compiles the modules in
the tables below with those names replaced. Neither `torch` nor any installed file is touched.

* `CPU_SUBSTITUTIONS` apply where `torch.cuda.is_available()` is False. With CUDA the stock source runs.
* `ONEDNN_SUBSTITUTIONS` apply there too, if this torch was built with oneDNN.
* `TORCH_ADAMW_FIXES` repair checkpointing of `torch.optim.AdamW` inside the distributed optimizer. Megatron-core takes that optimizer
  wherever neither Transformer Engine nor Apex is installed, so they apply there, CUDA or not.
* `ROUTER_FIXES` repair the router of a mixture of experts where Transformer Engine is not installed, CUDA or not.
* `CHECKPOINT_FIXES` repair the distributed optimizer's checkpoints, everywhere.

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
            "pipeline_parallel.p2p_communication": 6,
            "tensor_parallel.layers": 8,
            "tensor_parallel.mappings": 5,
            "transformer.moe.router": 6,
            "utils": 2,
        },
    ),
    Substitution(
        "move to the device",
        r"\.cuda\(\)",
        ".cpu()",
        {"models.common.language_module.language_module": 1, "optimizer.distrib_optimizer": 1},
    ),
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
        {
            "dist_checkpointing.strategies.async_utils": 1,
            "dist_checkpointing.strategies.filesystem_async": 1,
            "pipeline_parallel.p2p_communication": 2,
        },
    ),
    # There is one generator.
    Substitution(
        "random numbers",
        r"torch\.cuda\.(get_rng_state|manual_seed)\(",
        r"torch.\1(",
        {"tensor_parallel.random": 4},
    ),
    Substitution(
        "random state",
        r"return torch\.cuda\.random\.get_rng_state\(device=device\)",
        "return torch.get_rng_state()",
        {"tensor_parallel.random": 1},
    ),
    Substitution(
        "set random state",
        r"_lazy_call\(cb\)",
        "torch.set_rng_state(new_state)",
        {"tensor_parallel.random": 1},
    ),
    # Experts: counts of tokens become lists for the all-to-all, on a stream of its own where there are streams.
    Substitution(
        "token counts",
        r"torch\.is_tensor\(tensor\) and tensor\.is_cuda",
        "torch.is_tensor(tensor)",
        {"transformer.moe.moe_utils": 1},
    ),
    Substitution(
        "memory of another stream",
        r"tensor\.record_stream\(torch\.cuda\.current_stream\(\)\)",
        "pass",
        {"transformer.moe.moe_utils": 1},
    ),
    Substitution(
        "streams",
        r"torch\.cuda\.(Stream|current_stream|stream)\(",
        r"torch.cpu.\1(",
        {"transformer.moe.token_dispatcher": 4},
    ),
    Substitution(
        "event",
        r"self\.cuda_dtoh_stream\.record_event\(\)",
        "torch.cpu.Event()",
        {"transformer.moe.token_dispatcher": 1},
    ),
    # Experts that are split too: gloo gathers and scatters equal parts only.
    Substitution(
        "gathering of unequal parts",
        r"torch\.distributed\.all_gather\(output_tensor_list, input_, group=group\)",
        "torch.distributed.all_to_all_single(\n"
        "            output, torch.cat([input_] * world_size), output_split_sizes, [len(input_)] * world_size, group=group)",
        {"tensor_parallel.mappings": 1},
    ),
    Substitution(
        "summing of unequal parts",
        r"torch\.distributed\.reduce_scatter\(output, input_tensor_list, group=group\)",
        "total = input_.clone()\n"
        "        torch.distributed.all_reduce(total, group=group)\n"
        "        output.copy_(torch.split(total, input_split_sizes, dim=0)[rank])",
        {"tensor_parallel.mappings": 1},
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
        "grad_input = "
        + _ONEDNN.format("grad_output", "weight.t()")
        + r"\n\n        if ctx.sequence_parallel",
        {"tensor_parallel.layers": 1},
    ),
    Substitution(
        "gradient of its weight",
        r"grad_weight = grad_output\.t\(\)\.matmul\(total_input\)",
        # It refuses to add up nothing: an expert that no token chose.
        "grad_weight = "
        + _ONEDNN.format("total_input.t()", "grad_output.t()")
        + ".t() if len(total_input) else torch.zeros_like(weight)",
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

ROUTER_FIXES = (
    # The name is not defined where its import failed.
    Substitution(
        "Transformer Engine's matrix product",
        r"if te_general_gemm is not None",
        "if HAVE_TE and te_general_gemm is not None",
        {"transformer.moe.moe_utils": 2},
    ),
)


CHECKPOINT_FIXES = (
    # The gathered state leaves out the padding between buckets, which the positions of parameters count. A shared embedding on two pipeline
    # stages has a bucket of its own: without this, all that follows it would be saved shifted.
    Substitution(
        "position without padding",
        r"state_ten = world_tensors\[state_key\]\[param_world_start:param_world_end\]",
        "gap = sum(b.grad_data.numel() - b.numel_unpadded for b in buffer.buckets[: buffer.param_index_map[model_param][2]]);"
        " state_ten = world_tensors[state_key][param_world_start - gap : param_world_end - gap]",
        {"optimizer.distrib_optimizer": 1},
    ),
)


def substitutions(
    cuda: bool, onednn: bool, transformer_engine: bool, apex: bool
) -> tuple[Substitution, ...]:
    """What must change on a machine that has these, or does not."""
    cpu = () if cuda else CPU_SUBSTITUTIONS + (ONEDNN_SUBSTITUTIONS if onednn else ())
    without = (() if transformer_engine else ROUTER_FIXES) + (
        () if transformer_engine or apex else TORCH_ADAMW_FIXES
    )
    return cpu + without + CHECKPOINT_FIXES


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
    transformer_engine, apex = (
        importlib.util.find_spec(name) is not None for name in ("transformer_engine", "apex")
    )
    return substitutions(
        torch.cuda.is_available(), torch.backends.mkldnn.is_available(), transformer_engine, apex
    )


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str):
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        return compile(
            adapt(fullname.removeprefix("megatron.core."), source, _active()),
            path,
            "exec",
            dont_inherit=True,
        )


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
    modules = frozenset(
        f"megatron.core.{module}" for substitution in _active() for module in substitution.counts
    )
    if not modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise ImportError(
            "megatron.core was imported before areal_lite.megatron: import areal_lite.megatron first"
        )
    sys.meta_path.insert(0, _Finder(modules))
