"""Adapt Megatron-core 0.16.1 to this machine, by an import hook.

Megatron-core names CUDA devices in its source and has defects that no setting avoids. `install`
puts a finder in front of `megatron.core` that compiles the affected modules from adapted source.
Neither `torch` nor any installed file is touched.

Invariant: every substitution matches exactly as often as its table says. Another release of
Megatron-core raises ImportError instead of running with half of the changes.

Each table says when it applies, what Megatron-core does wrong, where, and when to remove it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import warnings
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Substitution:
    """Replace the regular expression `pattern` by `replacement`.

    counts: module below megatron.core -> number of matches that its source must have.
    """

    name: str
    pattern: str
    replacement: str
    counts: dict[str, int]


def adapt(module: str, source: str, table: tuple[Substitution, ...]) -> str:
    """Apply `table` to the source of `module`, named from below megatron.core.

    Raises ImportError when a pattern matches another number of times than its table says.
    """
    for substitution in table:
        expected = substitution.counts.get(module, 0)
        if not expected:
            continue
        source, count = re.subn(substitution.pattern, substitution.replacement, source)
        if count != expected:
            raise ImportError(
                f"megatron.core.{module}: '{substitution.name}' matches {count} times, not"
                f" {expected}: areal_lite.megatron needs megatron-core 0.16.1"
            )
    return source


# Applies without Transformer Engine and Apex: Megatron-core then uses torch.optim.AdamW, which
# keeps one `step` tensor for each parameter instead of one number for each parameter group.
# Where: `DistributedOptimizer` in megatron/core/optimizer/distrib_optimizer.py, and optimizer.py.
# Upstream: no report found; the main branch of August 2026 has the same code.
# Remove when tests/ranks/test_checkpoint.py passes without these three.
TORCH_ADAMW_FIXES = (
    # `sharded_state_dict` leaves out a step of 0, and torch's `load_state_dict` needs it.
    Substitution(
        name="step of a fresh optimizer",
        pattern=r"if step:",
        replacement="if step is not None:",
        counts={"optimizer.optimizer": 2},
    ),
    # `_set_main_param_and_optimizer_states` copies `step` from the checkpoint's tensors, but the
    # checkpoint holds it in the parameter groups.
    Substitution(
        name="step is no parameter state",
        pattern=r"dst_tensors\[key\]\.copy_\(tensors\[key\]\)",
        replacement='key == "step" or dst_tensors[key].copy_(tensors[key])',
        counts={"optimizer.distrib_optimizer": 1},
    ),
    # `load_state_dict` gives all parameters one tensor, which each of them then advances.
    Substitution(
        name="a step of its own for each parameter",
        pattern=r"(?m)s\[\"step\"\] = step$",
        replacement='s["step"] = step.clone()',
        counts={"optimizer.distrib_optimizer": 1},
    ),
)

# Applies always: megatron/core/inference/contexts/dynamic_context.py and
# megatron/core/transformer/moe/fused_a2a.py look for packages that are not needed here. SGLang
# brings some to a GPU machine. Only an ImportError counts as their absence, and CUDA packages also
# raise others (a missing library, a version). wandb takes half a second to import.
# Upstream: no report found.
# Remove when both files catch every exception, and nothing imports wandb before it is used.
IMPORT_FIXES = (
    Substitution(
        name="packages that do not load",
        pattern=r"except ImportError:\n(    HAVE_(?:FLASHINFER|TORCH\w+|DEEP_EP|HYBRIDEP) = False)",
        replacement=r"except Exception:\n\1",
        counts={"inference.contexts.dynamic_context": 2, "transformer.moe.fused_a2a": 2},
    ),
    Substitution(
        name="wandb",
        pattern=r"(?m)^    import wandb\b(?! as)",
        replacement="    raise ImportError",
        counts={"inference.contexts.dynamic_context": 1, "timers": 1},
    ),
)

# Applies always: `DistributedOptimizer.sharded_param_state_fully_reshardable` in
# megatron/core/optimizer/distrib_optimizer.py. The gathered state leaves out the padding between
# buckets, but the positions of parameters count it. All parameters after the first bucket would be
# saved shifted; an embedding shared by two pipeline stages makes a second bucket.
# Upstream: NVIDIA/Megatron-LM#5077, merged in 2026 after 0.16.1.
# Remove with the first release that contains it.
CHECKPOINT_FIXES = (
    Substitution(
        name="position without padding",
        pattern=r"state_ten = world_tensors\[state_key\]\[param_world_start:param_world_end\]",
        replacement="gap = sum(b.grad_data.numel() - b.numel_unpadded"
        " for b in buffer.buckets[: buffer.param_index_map[model_param][2]]);"
        " state_ten = world_tensors[state_key][param_world_start - gap : param_world_end - gap]",
        counts={"optimizer.distrib_optimizer": 1},
    ),
)

# Applies always: `DistributedOptimizer.get_parameter_state_dp_zero` in the same file. With NCCL, a
# bucket of master weights or moments is gathered in the GPU's memory. Here a bucket is a whole
# model: at the first checkpoint a rank would need up to 8 bytes for each of its parameters, on top
# of what training holds.
# Upstream: no report found. Its other way needs gloo groups and gathers on one rank.
# Remove when buckets are gathered in pieces.
GATHER_FIXES = (
    Substitution(
        name="gathered buckets in host memory",
        pattern=r'device = "cpu" if use_gloo_comm else torch\.\w+\.current_device\(\)',
        replacement='device = "cpu"',
        counts={"optimizer.distrib_optimizer": 1},
    ),
    Substitution(
        name="own shard in host memory",
        pattern=r"send_tensor = send_tensor\.\w+\(\)",
        replacement="pass",
        counts={"optimizer.distrib_optimizer": 1},
    ),
    Substitution(
        name="gather in pieces",
        pattern=r"torch\.distributed\.all_gather\(\s+recv_tensors, send_tensor, "
        r"data_parallel_group\s+\)",
        replacement="from areal_lite.megatron.parallel import all_gather_on_host; "
        "all_gather_on_host(recv_tensors, send_tensor, data_parallel_group)",
        counts={"optimizer.distrib_optimizer": 1},
    ),
)


def substitutions(
    device: tuple[Substitution, ...] | None, *, transformer_engine: bool, apex: bool
) -> tuple[Substitution, ...]:
    """Select the substitutions for a machine with, or without, these packages.

    `device`: the table of a device without CUDA, None with CUDA.
    """
    table = IMPORT_FIXES + (device or ())
    if not (transformer_engine or apex):
        table += TORCH_ADAMW_FIXES
    return table + CHECKPOINT_FIXES + GATHER_FIXES


class _Loader(importlib.machinery.SourceFileLoader):
    """Compile a module from its adapted source, past any cached bytecode."""

    table: tuple[Substitution, ...] = ()

    def get_code(self, fullname: str):
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        adapted = adapt(fullname.removeprefix("megatron.core."), source, self.table)
        return compile(adapted, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Find modules of `table` where Python would, and give them the adapting loader."""

    def __init__(self, table: tuple[Substitution, ...]):
        self.table = table
        self.modules = {f"megatron.core.{module}" for one in table for module in one.counts}

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.table = self.table
        return spec


def install(device: tuple[Substitution, ...] | None) -> None:
    """Put the import hook in place, once. Warns of packages that change what Megatron-core does.

    `device` is as in `substitutions`. Raises ImportError when megatron.core is already imported and
    can no longer be adapted.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise ImportError(
            "megatron.core was imported before areal_lite.megatron:"
            " import areal_lite.megatron first"
        )
    find = importlib.util.find_spec
    packages = {name: bool(find(name)) for name in ("transformer_engine", "apex")}
    sys.meta_path.insert(0, _Finder(substitutions(device, **packages)))
    if found := " and ".join(name for name, installed in packages.items() if installed):
        text = f"Megatron-core uses {found} here, with which areal_lite was not tested"
        warnings.warn(text, stacklevel=2)
