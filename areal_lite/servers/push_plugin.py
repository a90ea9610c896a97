"""An SGLang plugin for pushes of weights. SGLang loads it through its entry-point group.

* Weight groups: a server joins, receives and leaves as `weight_group.py` describes. The answer to a
  request means that the weights have arrived, and a server whose group breaks can join the next.
* Adapters alone: the server adds them to the weights of its checkpoint (`adapted_weights.py`).
* Pauses in place with overlapped scheduling, SGLang's default on GPUs: a pause leaves one forward
  pass launched whose result is not processed yet. It may still read the weights. With tensor
  parallelism its all-reduces could deadlock with the broadcast
  (https://github.com/sgl-project/sglang/pull/22620). SGLang would also count the token that it
  samples to the version that comes after it.

Groups and pauses of other clients stay as SGLang made them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from areal_lite.servers import routes_plugin, sampling_plugin

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
# SGLang's own limit for a group. The trainer closes the store long before.
_LIMIT = timedelta(minutes=30)
# How often to ask the trainer's store whether the group still lives, in seconds.
_ASK_EVERY_S = 0.05
# Whether SGLang has found this plugin in this process.
installed = False
# The memory of the last bucket, without a GPU.
_kept: Any = None


def install() -> None:
    """Register the hooks. Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # It imports torch, which whoever starts servers does without.
    from areal_lite.servers import memory_plugin

    global installed
    installed = True
    sampling_plugin.install()
    memory_plugin.install()
    routes_plugin.install()
    hooks = {
        f"{_UPDATER}.init_weights_update_group": _join_group,
        f"{_UPDATER}.destroy_weights_update_group": _leave_group,
        f"{_UPDATER}.receive_weights_from_distributed": _receive_weights,
        f"{_SCHEDULER}.pause_generation": _finish_forward_pass,
        f"{_SCHEDULER}.record_weight_version_change": _tag_pending_tokens,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _join_group(
    original: Callable,
    self: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    """Join a weight group and connect to its members. Return success and a message."""
    from areal_lite.servers.weight_group import GROUP_PREFIX, JOIN_FAILED, GroupMember, connect

    if not group_name.startswith(GROUP_PREFIX):
        where = (master_address, master_port, rank_offset, world_size)
        return original(self, *where, group_name, backend)
    try:
        store = connect(master_address, master_port, _LIMIT)
        self._model_update_group[group_name] = GroupMember(
            store,
            backend,
            world=world_size,
            rank=rank_offset + self.tp_rank,
            name=group_name,
            limit=_LIMIT,
        )
    except Exception as error:
        return False, f"{JOIN_FAILED} {group_name}: {error}"
    return True, f"joined weight group {group_name}"


def _leave_group(original: Callable, self: Any, group_name: str) -> tuple[bool, str]:
    """Leave a weight group. It succeeds if this server has left already."""
    from areal_lite.servers.weight_group import GROUP_PREFIX

    if not group_name.startswith(GROUP_PREFIX):
        return original(self, group_name)
    member = self._model_update_group.pop(group_name, None)
    if member is not None:
        member.abort()
    return True, f"left weight group {group_name}"


def _receive_weights(original: Callable, self: Any, **request: Any) -> Iterable[tuple[str, Any]]:
    """Receive one flattened bucket and return its weights by name. A failure ends the group."""
    from areal_lite.servers.adapted_weights import ADAPTERS, AdaptedWeights
    from areal_lite.servers.weight_group import GroupMember

    member = self._model_update_group.get(request["group_name"])
    if not isinstance(member, GroupMember):
        return original(self, **request)
    door, _, scale = (request.get("load_format") or "").partition(":")
    try:
        tensors = receive_bucket(
            member, request["names"], request["dtypes"], request["shapes"], self.device
        )
        if door != ADAPTERS:
            return tensors
        return AdaptedWeights(tensors, self.model_config.model_path, float(scale))
    except Exception:
        self._model_update_group.pop(request["group_name"]).abort()
        raise


def receive_bucket(
    member: Any, names: list[str], dtypes: list[Any], shapes: list[Any], device: str
) -> list[tuple[str, Any]]:
    """Receive tensors that were flattened into one of uint8, and return them by name."""
    import torch

    kinds = [kind if isinstance(kind, torch.dtype) else getattr(torch, kind) for kind in dtypes]
    sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds)]
    data = _buffer(sum(sizes), device)
    asked_at = time.monotonic()

    def given_up() -> bool:
        nonlocal asked_at
        if time.monotonic() - asked_at < _ASK_EVERY_S:
            return False
        asked_at = time.monotonic()
        return member.store_closed()

    member.broadcast(data, given_up)
    parts = zip(names, data.split(sizes), kinds, shapes)
    return [(name, part.view(kind).reshape(shape)) for name, part, kind, shape in parts]


def _buffer(size: int, device: str) -> Any:
    """Return memory for a bucket, uint8 [size].

    Without a GPU it is that of the last bucket, whose weights the model has by now. The system
    would give new memory page by page, during the pause.
    """
    global _kept
    import torch

    if device != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    if _kept is None or len(_kept) < size:
        _kept = None  # before there are two
        _kept = torch.empty(size, dtype=torch.uint8)
    return _kept[:size]


def _finish_forward_pass(original: Callable, self: Any, recv_req: Any) -> Any:
    """Pause, and wait in mode `in_place` for what runs on this rank's GPU.

    Every rank of the server does so before it answers the next request, which begins the update.
    """
    result = original(self, recv_req)
    if recv_req.mode == "in_place" and self.enable_overlap and self.device != "cpu":
        self.forward_stream.synchronize()
        self.schedule_stream.synchronize()
    return result


def _tag_pending_tokens(original: Callable, self: Any, new_version: str | None) -> None:
    """Change the version, and count the tokens of a pending result to the old one."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old = get_serving().weight_version
    original(self, new_version)
    if new_version in (None, old) or not self.enable_overlap:
        return
    for batch, _ in self.result_queue:
        for req in batch.reqs:
            if req.finished() or req.inflight_middle_chunks > 0:
                continue  # the result has no token for it
            events, produced = req.weight_version_events, len(req.output_ids)
            if events and events[-1] == WeightVersionEvent(old, produced):
                del events[-1]
            events.append(WeightVersionEvent(old, produced + 1))
