"""A stand-in for torchvision in the processes of an SGLang server.

SGLang imports torchvision for image models. The torchvision of a package index does not load with
a CPU build of torch. A text model never calls it, so names are enough:
every module `torchvision.*` imports, every attribute is a placeholder, and calling a placeholder
raises ImportError.

transformers would take the stand-in for the real package, so it is installed in server processes
only (their workers are forked and inherit it), and never next to a real torchvision.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence


def _attribute(owner: type | types.ModuleType, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type.__new__(_Placeholder, f"{owner.__name__}.{name}", (), {})


class _Placeholder(type):
    __getattr__ = _attribute

    def __call__(cls, *args: object, **kwargs: object) -> None:
        raise ImportError(
            f"{cls.__name__} was called, but torchvision is not installed:"
            " this server can run text models only"
        )


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> type:
        return _attribute(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None):
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="stand-in", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in_for_torchvision() -> None:
    """Make `import torchvision` work in this process when no torchvision is installed."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Finder())
