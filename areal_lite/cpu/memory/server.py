"""The server's half of `sync.transport=memory`, behind SGLang's `/update_weights_from_disk`.

The `load_format` of a request says what to do with the staged file in `model_path`:

* `areal_lite_check:DIGEST`: compare all of it with its checksum. The HTTP process does so on a
  thread of its own, while the scheduler generates.
* `areal_lite_activate:DIGEST`: copy it into the model. The scheduler does so between two steps, so
  that the server need not be paused. Only a version that was checked can be activated.

`LoadPlan` finds out what a model's `load_weights` would write before anything is written, whether
every parameter would be complete, and of the right shape (sglang_plugins/load_plan.py). Making the
recorded writes is then all that a load is.

A request that is refused has changed nothing: the server goes on with the weights that it has.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from areal_lite.cpu.memory.staged import ACTIVATE, CHECK, StagedError, StagedFile
from areal_lite.data.model_folder import UNTRAINED
from areal_lite.sglang_plugins.load_plan import COPY, LoadError, Write, record_writes, storage


class LoadPlan:
    """The writes with which `tensors` would become the parameters of `model`.

    Nothing is written yet. Raises LoadError if a parameter would not be complete, or if a tensor
    does not fit.
    """

    def __init__(self, model: Any, tensors: list[tuple[str, torch.Tensor]]):
        self._addresses = _addresses(model)
        self._writes = record_writes(model, tensors)
        _check_complete(dict(model.named_parameters()), self._writes)
        # A loader that computes before it copies has read the content of this version.
        sources = {storage(tensor) for _, tensor in tensors}
        copies = [args for write, args, _ in self._writes if write is COPY]
        self.repeatable = all(storage(source) in sources for _, source in copies)

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


def _check_complete(parameters: dict[str, torch.Tensor], writes: list[Write]) -> None:
    """Check that the writes cover each trained parameter, by the number of its elements."""
    regions = {}  # a region that is written twice counts once
    for _, (target, *_), _ in writes:
        regions[target.data_ptr(), target.shape, target.stride()] = target
    written: dict[int, int] = {}
    for target in regions.values():
        written[storage(target)] = written.get(storage(target), 0) + target.numel()
    missing = [
        name
        for name, parameter in parameters.items()
        if written.get(storage(parameter), 0) < parameter.numel() and not name.endswith(UNTRAINED)
    ]
    if missing:
        raise LoadError(f"the weights leave out all or parts of {', '.join(missing):.300}")


_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
# Path, checksum and version that the HTTP process has checked last.
_checked: tuple[str, str, str] | None = None
# The file that the scheduler has mapped, and how to load it.
_staged: "_Activation | None" = None


def install() -> None:
    """Register the hooks. Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = {
        f"{_TOKENIZER}.update_weights_from_disk": _handle_request,
        f"{_TOKENIZER}._update_model_path_info": _keep_model_path,
        f"{_UPDATER}.update_weights_from_disk": _load_weights,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


async def _handle_request(
    original: Callable, self: Any, obj: Any, request: Any = None
) -> tuple[bool, str, int]:
    """Answer a request in the HTTP process. Return success, a message and 0 paused requests."""
    door, _, digest = (obj.load_format or "").partition(":")
    if door == CHECK:
        return *await _check(obj, digest), 0
    if door != ACTIVATE:
        return await original(self, obj, request)
    if _checked != (obj.model_path, digest, obj.weight_version):
        return False, f"version {obj.weight_version} of the weights was not checked here", 0
    self.auto_create_handle_loop()
    # SGLang's own method would wait here until no request runs.
    answer = await self._wait_for_model_update_from_disk(obj)
    if answer[0]:
        self._update_weight_version_if_provided(obj.weight_version)
    return answer


async def _check(obj: Any, digest: str) -> tuple[bool, str]:
    global _checked
    path, version = obj.model_path, obj.weight_version
    _checked = None
    try:
        found = await asyncio.to_thread(_checked_version, path, digest)
    except StagedError as error:
        return False, str(error)
    if str(found) != version:
        return False, f"{path} holds version {found} of the weights, not {version}"
    _checked = path, digest, version
    return True, f"checked version {version} of the weights"


def _checked_version(path: str, digest: str) -> int:
    """Return the version of the file, if all of it has its checksum. Raises StagedError."""
    staged = StagedFile(path)
    try:
        return staged.check(digest).version
    finally:
        staged.close()


def _keep_model_path(original: Callable, self: Any, model_path: str, load_format: str) -> None:
    """Let the server go on naming its checkpoint, which requests of other clients may load."""
    if not load_format.startswith(ACTIVATE):
        original(self, model_path, load_format)


def _load_weights(
    original: Callable, self: Any, model_path: str, load_format: str, *args: Any, **options: Any
) -> tuple[bool, str]:
    """Load weights in the scheduler. Return success and a message."""
    door, _, digest = (load_format or "").partition(":")
    if door != ACTIVATE:
        return original(self, model_path, load_format, *args, **options)
    try:
        activate(self.get_model(), model_path, digest)
    except (LoadError, StagedError) as error:
        return False, str(error)
    return True, "activated the staged weights"


def activate(model: Any, path: str, digest: str) -> None:
    """Copy a staged version into `model`.

    Raises LoadError or StagedError with the model unchanged. Raises RuntimeError when the file
    changed during the copy: the model is then of no use, and the error ends the server.
    """
    global _staged
    if _staged is None or not _staged.is_current(path):
        _staged = None  # gives the memory of the old file back
        _staged = _Activation(path)
    _staged.run(model, digest)


class _Activation:
    """A mapped file, and the plan that loads it. Both are kept from push to push."""

    def __init__(self, path: str):
        self._file = StagedFile(path, populate=True)
        self._plan: LoadPlan | None = None
        self._table = b""

    def is_current(self, path: str) -> bool:
        return self._file.path == path and self._file.is_current()

    def run(self, model: Any, digest: str) -> None:
        header = self._file.header(digest)
        table = self._file.table(header)
        if self._plan is None or table != self._table or not self._plan.fits(model):
            self._plan = LoadPlan(model, self._file.tensors(header))
        plan, self._table = self._plan, table
        if not plan.repeatable:
            self._plan = None
        plan.run()
        try:
            self._file.header(digest)
        except StagedError as error:
            raise RuntimeError(f"{error}, after a part was copied into the model") from error
