"""Adapt Megatron-core 0.16.1 to this machine, by an import hook.

Megatron-core names CUDA devices in its source and has defects that no setting avoids. `install`
puts a finder in front of `megatron.core` that compiles the affected modules from adapted source.
Neither `torch` nor any installed file is touched. Which tables apply:

| table                  | applies                                                     |
|------------------------|-------------------------------------------------------------|
| `CPU_SUBSTITUTIONS`    | without CUDA                                                |
| `ONEDNN_SUBSTITUTIONS` | without CUDA, if torch was built with oneDNN                |
| `TORCH_ADAMW_FIXES`    | without Transformer Engine and Apex, with or without CUDA   |
| `ROUTER_FIXES`         | without Transformer Engine, with or without CUDA            |
| `IMPORT_FIXES`         | with CUDA                                                   |
| `CHECKPOINT_FIXES`     | always                                                      |
| `GATHER_FIXES`         | always                                                      |

Invariant: every substitution matches exactly as often as its table says. Another release of
Megatron-core raises ImportError instead of running with half of the changes.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from functools import cache

import torch

from areal_lite.cpu.megatron import CPU_SUBSTITUTIONS, ONEDNN_SUBSTITUTIONS
from areal_lite.megatron.patches.fixes import (
    CHECKPOINT_FIXES,
    GATHER_FIXES,
    IMPORT_FIXES,
    ROUTER_FIXES,
    TORCH_ADAMW_FIXES,
)
from areal_lite.megatron.patches.substitution import Substitution, adapt


def substitutions(
    *, cuda: bool, onednn: bool, transformer_engine: bool, apex: bool
) -> tuple[Substitution, ...]:
    """Select the substitutions for a machine with, or without, each of these."""
    table = IMPORT_FIXES
    if not cuda:
        table = CPU_SUBSTITUTIONS + (ONEDNN_SUBSTITUTIONS if onednn else ())
    if not transformer_engine:
        table += ROUTER_FIXES + (() if apex else TORCH_ADAMW_FIXES)
    return table + CHECKPOINT_FIXES + GATHER_FIXES


@cache
def _active() -> tuple[Substitution, ...]:
    return substitutions(
        cuda=torch.cuda.is_available(),
        onednn=torch.backends.mkldnn.is_available(),
        transformer_engine=_installed("transformer_engine"),
        apex=_installed("apex"),
    )


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class _Loader(importlib.machinery.SourceFileLoader):
    """Compile a module from its adapted source, past any cached bytecode."""

    def get_code(self, fullname: str):
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        adapted = adapt(fullname.removeprefix("megatron.core."), source, _active())
        return compile(adapted, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Find `modules` where Python would, and give them the adapting loader."""

    def __init__(self, modules: frozenset[str]):
        self.modules = modules

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def untested(transformer_engine: bool, apex: bool) -> str:
    """Describe the installed packages with which Megatron-core computes in other ways."""
    found = {"transformer_engine": transformer_engine, "apex": apex}
    names = " and ".join(name for name, installed in found.items() if installed)
    return names and (
        f"{names} installed: Megatron-core then takes other ways, which areal_lite has not tested;"
        " uninstall what you do not need"
    )


def install() -> None:
    """Put the import hook in place, once. Warns of packages that change what Megatron-core does.

    Raises ImportError when megatron.core is already imported and can no longer be adapted.
    """
    modules = frozenset(
        f"megatron.core.{module}" for substitution in _active() for module in substitution.counts
    )
    if not modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise ImportError(
            "megatron.core was imported before areal_lite.megatron:"
            " import areal_lite.megatron first"
        )
    sys.meta_path.insert(0, _Finder(modules))
    if text := untested(_installed("transformer_engine"), _installed("apex")):
        warnings.warn(text, stacklevel=2)
