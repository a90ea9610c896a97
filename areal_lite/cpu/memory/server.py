"""The server's half of `sync.transport=memory`, and of adapters that come before the pause.

The `load_format` of a request to `/update_weights_from_disk` says what to do with the staged file:

* `areal_lite_check:DIGEST`: compare all of it with its checksum. The HTTP process does so on a
  thread of its own, while the scheduler generates.
* `areal_lite_activate:DIGEST`: copy it into the model. The scheduler does so between two steps, so
  that the server need not be paused. Only a version that was checked can be activated.

A request that is refused has changed nothing: the server goes on with the weights that it has.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch

from areal_lite.cpu.memory.staged import ACTIVATE, CHECK, StagedError, StagedFile
from areal_lite.data.model_folder import UNTRAINED
from areal_lite.sglang_plugins import push
from areal_lite.sglang_plugins.load_plan import COPY, LoadError, Write, record_writes, storage
from areal_lite.sglang_plugins.weight_group import AHEAD


class NextWeights:
    """A second copy of the parameters that a push changes, loaded while the server generates."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._copies: dict[int, torch.UntypedStorage] = {}  # by the address of the original
        self._loads: dict[str, Future] = {}  # by the first name of a bucket

    def receive(self, original: Callable, *arguments: Any) -> tuple[bool, str]:
        """Begin to load a bucket, if this request to join a group describes one in JSON."""
        updater, *_, group, description = arguments
        if group != AHEAD:
            return original(*arguments)
        request = json.loads(description)
        store = updater._model_update_group[request["group_name"]].store
        load = self._loads[request["names"][0]] = self._thread.submit(self._load, updater, request)
        load.add_done_callback(lambda _: store.add(AHEAD, 1))
        return True, "loads the weights"

    def _load(self, updater: Any, request: dict[str, Any]) -> None:
        weights = updater.receive_weights_from_distributed(**request)
        record_writes(updater.get_model(), weights, self._write)

    def _write(self, write: Write) -> None:
        """Make a write to a parameter in the copy of its memory."""
        target, *sources = write.args
        if (address := storage(target)) not in self._copies:
            self._copies[address] = target.untyped_storage().clone()
        place = target.storage_offset(), target.shape, target.stride()
        copy = target.new_empty(0).set_(self._copies[address], *place)
        write.function(copy, *sources, **write.kwargs)

    def take(self, updater: Any, *_: Any) -> list[push.Named]:
        """Put the copies in the place of the parameters. No weights are left to load."""
        for load in self._loads.values():
            load.result()
        copies, self._copies, old = self._copies, {}, []
        for parameter in updater.get_model().parameters():
            if storage(parameter) in copies:
                old.append(parameter.data)
                place = parameter.storage_offset(), parameter.shape, parameter.stride()
                parameter.data = parameter.new_empty(0).set_(copies[storage(parameter)], *place)
        self._thread.submit(old.clear)  # giving memory back to the system takes time, too
        return []


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
        own = {storage(tensor) for _, tensor in tensors}
        sources = [args[1] for write, args, _ in self._writes if write is COPY]
        self.repeatable = own.issuperset(map(storage, sources))

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
    # A region that is written twice counts once.
    regions = {(to.data_ptr(), to.shape, to.stride()): to for _, (to, *_), _ in writes}
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

    next_weights = NextWeights()
    hooks = {
        f"{_TOKENIZER}.update_weights_from_disk": _handle_request,
        f"{_TOKENIZER}._update_model_path_info": _keep_model_path,
        f"{_UPDATER}.update_weights_from_disk": _load_weights,
        f"{_UPDATER}.init_weights_update_group": next_weights.receive,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    push.formats[AHEAD] = next_weights.take


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
    with closing(StagedFile(path)) as staged:
        return staged.check(digest).version


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
    if _staged is None or _staged.file.path != path or not _staged.file.is_current():
        _staged = None  # gives the memory of the old file back
        _staged = _Activation(path)
    _staged.run(model, digest)


class _Activation:
    """A mapped file, and the plan that loads it. Both are kept from push to push."""

    def __init__(self, path: str):
        self.file = StagedFile(path, populate=True)
        self._plan: LoadPlan | None = None
        self._table = b""

    def run(self, model: Any, digest: str) -> None:
        header = self.file.header(digest)
        table = self.file.table(header)
        if self._plan is None or table != self._table or not self._plan.fits(model):
            self._plan = LoadPlan(model, self.file.tensors(header))
        plan, self._table = self._plan, table
        if not plan.repeatable:
            self._plan = None
        plan.run()
        try:
            self.file.header(digest)
        except StagedError as error:
            raise RuntimeError(f"{error}, after a part was copied into the model") from error
