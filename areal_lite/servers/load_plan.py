"""What a model's `load_weights` would write, found out before anything is written.

SGLang's loaders cut and merge tensors (q, k and v go into one parameter). They are run once while
writes to parameters are recorded instead of made. The record says whether every parameter is
complete and of the right shape. Making the recorded writes is then all that a load is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_lite.servers.staged_file import StagedError

_aten = torch.ops.aten
_COPY = _aten.copy_.default
# Loaders copy, and they fill the padding of a vocabulary.
_WRITES = {_COPY, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


class LoadPlan:
    """The writes with which `tensors` would become the parameters of `model`.

    Nothing is written yet. Raises StagedError if a parameter would not be complete, or if a tensor
    does not fit.
    """

    def __init__(self, model: Any, tensors: list[tuple[str, torch.Tensor]]):
        parameters = dict(model.named_parameters())
        self._addresses = _addresses(model)
        recorder = _Recorder({_storage(parameter) for parameter in parameters.values()})
        try:
            with torch.no_grad(), recorder:
                model.load_weights(iter(tensors))
        except StagedError:
            raise
        except Exception as error:  # a loader asserts, or raises what it likes
            reason = f"{type(error).__name__} {error}".strip()
            raise StagedError(f"the server's model cannot take the weights: {reason}") from error
        self._writes = recorder.writes
        _check_complete(parameters, recorder.writes)
        # A loader that computes before it copies has read the content of this version.
        sources = {_storage(tensor) for _, tensor in tensors}
        self.repeatable = all(
            _storage(args[1]) in sources for write, args, _ in self._writes if write is _COPY
        )

    def fits(self, model: Any) -> bool:
        """Return whether the parameters of `model` are where they were."""
        return self._addresses == _addresses(model)

    @torch.no_grad()
    def run(self) -> None:
        """Write the parameters."""
        for write, args, kwargs in self._writes:
            write(*args, **kwargs)


def _addresses(model: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    """Records writes to the given storages in place of making them."""

    def __init__(self, storages: set[int]):
        super().__init__()
        self._storages = storages
        self.writes: list[tuple[Any, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = args[0] if args else None
        if not func._schema.is_mutable or not isinstance(target, torch.Tensor):
            return func(*args, **kwargs)
        if _storage(target) not in self._storages:
            return func(*args, **kwargs)
        if func not in _WRITES:
            raise StagedError(
                f"the server's model loads weights with {func}: use sync.transport=distributed"
            )
        if func is _COPY and args[1].shape != target.shape:
            raise StagedError(
                f"a tensor of shape {list(args[1].shape)} does not fit the {list(target.shape)} of "
                "the server's parameter"
            )
        self.writes.append((func, args, kwargs))
        return target


def _check_complete(parameters: dict[str, torch.Tensor], writes: list[tuple]) -> None:
    """Check that the writes cover each parameter, by the number of its elements."""
    regions = {}  # a region that is written twice counts once
    for _, (target, *_), _ in writes:
        regions[target.data_ptr(), target.shape, target.stride()] = target
    written: dict[int, int] = {}
    for target in regions.values():
        written[_storage(target)] = written.get(_storage(target), 0) + target.numel()
    missing = [
        name
        for name, parameter in parameters.items()
        if written.get(_storage(parameter), 0) < parameter.numel()
    ]
    if missing:
        raise StagedError(f"the weights leave out all or parts of {', '.join(missing):.300}")
