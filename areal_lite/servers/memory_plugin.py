"""The server's half of `sync.transport=memory`, behind SGLang's `/update_weights_from_disk`.

The `load_format` of a request says what to do with the staged file in `model_path`:

* `areal_lite_check:DIGEST`: compare all of it with its checksum. The HTTP process does so on a
  thread of its own, while the scheduler generates. If the trainer's file cannot be mapped here, it
  receives a copy first, from the source in `manifest` (`staged_copy.py`).
* `areal_lite_activate:DIGEST`: copy it into the model. The scheduler does so between two steps, so
  that the server need not be paused. Only a version that was checked can be activated.

A request that is refused has changed nothing: the server goes on with the weights that it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from areal_lite.servers.load_plan import LoadPlan
from areal_lite.servers.staged_copy import Source, StagedCopy
from areal_lite.servers.staged_file import ACTIVATE, CHECK, StagedError, StagedFile

_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
# Path, checksum and version that the HTTP process has checked last, and where the file is here.
_checked: tuple[tuple[str, str, str], str] | None = None
# The memory of this HTTP process for files that cannot be mapped here.
_copy: StagedCopy | None = None
# The file that the scheduler has mapped, and how to load it.
_staged: _Activation | None = None


def install() -> None:
    """Register the hooks."""
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
    if _checked is None or _checked[0] != (obj.model_path, digest, obj.weight_version):
        return False, f"version {obj.weight_version} of the weights was not checked here", 0
    obj.model_path = _checked[1]
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
        source = Source.parse(obj.manifest)
        here, found = await asyncio.to_thread(_check_file, path, source, digest)
    except StagedError as error:
        return False, str(error)
    if str(found) != version:
        return False, f"{path} holds version {found} of the weights, not {version}"
    _checked = (path, digest, version), here
    return True, f"checked version {version} of the weights"


def _check_file(path: str, source: Source, digest: str) -> tuple[str, int]:
    """Return where the file is on this machine, and its version. Raises StagedError.

    If the trainer's file cannot be mapped, a copy is received first.
    """
    global _copy
    if not source.can_map(path):
        _copy = _copy or StagedCopy()
        _copy.fetch(source)
        path = _copy.path
    staged = StagedFile(path)
    try:
        return path, staged.check(digest).version
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
    except StagedError as error:
        return False, str(error)
    return True, "activated the staged weights"


def activate(model: Any, path: str, digest: str) -> None:
    """Copy a staged version into `model`.

    Raises StagedError with the model unchanged. Raises RuntimeError when the file changed during
    the copy: the model is then of no use, and the error ends the server.
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
