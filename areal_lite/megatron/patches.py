"""Adapt Megatron-core 0.16.1 to this machine, by an import hook.

Megatron-core names CUDA devices in its source and has defects that no setting avoids. `install`
puts a finder in front of `megatron.core` that compiles the affected modules from adapted source.
Neither `torch` nor any installed file is touched. The tables (patch_table.py) and when they apply:

| table                  | applies                                                     |
|------------------------|-------------------------------------------------------------|
| of the device          | without CUDA (extensions.py)                                |
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

from areal_lite.megatron.patch_table import Substitution, adapt, substitutions


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


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


def untested(transformer_engine: bool, apex: bool) -> str:
    """Describe the installed packages with which Megatron-core uses other code paths."""
    found = {"transformer_engine": transformer_engine, "apex": apex}
    names = " and ".join(name for name, installed in found.items() if installed)
    return names and f"Megatron-core uses {names} here, with which areal_lite was not tested"


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
    packages = {name: _installed(name) for name in ("transformer_engine", "apex")}
    sys.meta_path.insert(0, _Finder(substitutions(device, **packages)))
    if text := untested(**packages):
        warnings.warn(text, stacklevel=2)
