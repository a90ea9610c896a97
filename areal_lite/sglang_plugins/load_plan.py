"""Record where the weights of a checkpoint go in a server's parameters.

SGLang's loaders cut and merge tensors: q, k and v go into one parameter, and a rank of a
tensor-parallel server keeps a slice. They are run while writes to parameters are recorded instead
of made. Nothing is written, and the record says where each element would go.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Named = tuple[str, torch.Tensor]

_aten = torch.ops.aten
COPY = _aten.copy_.default
# Loaders copy, and they fill the padding of a vocabulary.
_WRITES = {COPY, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


class LoadError(ValueError):
    """Weights that a server's model cannot take in this way."""


class Write(NamedTuple):
    """One write: `function(*args, **kwargs)`, where args[0] is a view of a parameter."""

    function: Any
    args: tuple
    kwargs: dict


def record_writes(
    model: Any, tensors: Iterable[Named], write: Callable[[Write], object] | None = None
) -> list[Write]:
    """Return the writes with which `model` would load `tensors`, in their order.

    A function `write` gets each of them instead, before the next tensor is read. Raises LoadError
    if a tensor does not fit, or if the model does more than to copy and to fill.
    """
    if hasattr(model, "post_load_weights"):  # DeepSeek-V3
        raise LoadError(
            "the server's model computes more from its weights: use sync.transport=distributed"
        )
    writes: list[Write] = []
    recorder = _Recorder({storage(p) for p in model.parameters()}, write or writes.append)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(tensors))
    except LoadError:
        raise
    except Exception as error:  # a loader asserts, or raises what it likes
        reason = f"{type(error).__name__} {error}".strip()
        raise LoadError(f"the server's model cannot take the weights: {reason}") from error
    return writes


def storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory of which `tensor` is a view."""
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    """Passes writes to the given storages on in place of making them."""

    def __init__(self, storages: set[int], write: Callable[[Write], object]):
        super().__init__()
        self._storages = storages
        self._write = write

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # SGLang's centered norms also compute 1 + weight, for kernels that only a GPU has.
        target = kwargs.get("out", args[0] if args else None)
        if not func._schema.is_mutable or not isinstance(target, torch.Tensor):
            return func(*args, **kwargs)
        if storage(target) not in self._storages:
            return func(*args, **kwargs)
        if func not in _WRITES:
            raise LoadError(
                f"the server's model loads weights with {func}: use sync.transport=distributed"
            )
        if func is COPY and args[1].shape != target.shape:
            raise LoadError(
                f"a tensor of shape {list(args[1].shape)} does not fit the {list(target.shape)} of "
                "the server's parameter"
            )
        self._write(Write(func, args, kwargs))
        return target
