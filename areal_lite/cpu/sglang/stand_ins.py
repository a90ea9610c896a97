"""Stand-ins for packages that SGLang imports and that a text model without a GPU never calls.

* torchvision handles images. The one of a package index does not load with a CPU build of torch.
* triton compiles GPU kernels, and takes a gigabyte of disk.

Every module of such a package imports, and every attribute is a placeholder. SGLang decorates its
kernels when it is imported (`@triton.jit`, `@triton.autotune(configs=[…])`): they stay plain
functions, which fail when they are launched. A placeholder of torchvision fails when it is called.

transformers would take a stand-in for the real package, so stand-ins are installed in server
processes only (their workers are forked and inherit them), and never next to the real package.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

# Package -> whether its placeholders may be called.
_DECORATES = {"triton": True, "torchvision": False, "IPython": False, "soundfile": False}


def _attribute(owner: type | types.ModuleType, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type.__new__(_Placeholder, f"{owner.__name__}.{name}", (), {})


class _Placeholder(type):
    __getattr__ = _attribute

    def __call__(cls, *args: object, **kwargs: object) -> object:
        package = cls.__name__.partition(".")[0]
        if cls.__name__.endswith(".get_current_target"):
            raise RuntimeError("there is no GPU")  # as triton says
        if not _DECORATES[package]:
            raise ImportError(
                f"{cls.__name__} was called, but {package} is not installed:"
                " this server can run text models only"
            )
        return args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType) else cls


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> type:
        return _attribute(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None):
        if fullname.partition(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="stand-in", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install_stand_ins() -> None:
    """Make `import torchvision` and `import triton` work in this process where they are missing."""
    for package in _DECORATES:
        if importlib.util.find_spec(package) is None:
            sys.meta_path.append(_Finder(package))
