"""The plugins inside an SGLang server: hooks around its functions, for pushes and for tokens.

A push of weights. Groups of other clients stay as SGLang made them:

* Weight groups (weight_group.py): the answer to a request means that the weights have arrived, and
  a server whose group breaks can join the next.
* Adapters alone: the server adds them to the weights of its checkpoint (`adapted_weights`).
* Pauses in place with overlapped scheduling, SGLang's default on GPUs: a pause leaves one forward
  pass launched whose result is not processed yet. It may still read the weights, and with tensor
  parallelism its all-reduces could deadlock with the broadcast
  (https://github.com/sgl-project/sglang/pull/22620). SGLang would also count its token to the next
  version.
* Parked servers (weights/turns.py) stay paused, even if told to continue, until they have all of
  their memory back. Asking twice to give it back, or to take it, changes nothing.
* Read-back: with AREAL_LITE_READBACK=1, every architecture answers `/get_weights_by_name`, with the
  names of the server's own parameters. Pushes are verified with it.

Sampling, and SGLang's report about a sampled token:

* Greedy requests change no other request's tokens under `server.deterministic`. SGLang takes greedy
  for top-k sampling, and samples the whole batch from sorted probabilities, where it hashes the
  rank of a token in place of the token.
* A retracted request returns the routes of its own forward passes. SGLang loses them with the KV
  cache, computes the tokens again, perhaps by newer weights, and would return those routes.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import cache, partial
from importlib import metadata
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from areal_lite import sglang_plugins
from areal_lite.data.model_folder import open_tensors, weight_files
from areal_lite.sglang_plugins import ENV_READBACK, weight_group
from areal_lite.sglang_plugins.load_plan import Named
from areal_lite.sglang_plugins.prefill import compute_shared_once

_RUNNER = "sglang.srt.model_executor.model_runner"
_UPDATER = f"{_RUNNER}_components.weight_updater.WeightUpdater"
_READ = f"{_RUNNER}_components.weight_exporter.WeightExporter.get_weights_by_name"
_MANAGERS = "sglang.srt.managers"
_SCHEDULER = f"{_MANAGERS}.scheduler.Scheduler"
_PARKING = f"{_MANAGERS}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_RESULTS = f"{_MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
# SGLang's own limit for a group. The trainer closes the store long before.
_LIMIT = timedelta(minutes=30)
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)  # a hook passes them on
# How often to ask the trainer's store whether the group still lives, in seconds.
_ASK_EVERY_S = 0.05
_PARKED_REST_S = 0.005
empty_bucket: Callable[..., torch.Tensor] = torch.empty
"""Makes the memory of a bucket. A device may replace it."""
_AT_A_TIME = 2**24  # elements of W that are in float32 at a time


def install() -> None:
    """Register the hooks with SGLang."""
    from sglang.srt.plugins import hook_registry as registry

    sglang_plugins.installed = True
    # SGLang's dumper would import Megatron-core where it is installed: an eighth of the start.
    sys.modules["megatron"] = None  # pyright: ignore[reportArgumentType]
    for target, hook in hooks().items():
        registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
    # SGLang searches all modules for those that have imported a hooked function, 60 ms for each.
    # No module imports a method.
    search = registry._propagate_patch
    registry._propagate_patch = lambda old, new, owner: (
        0 if isinstance(owner, type) else search(old, new, owner)
    )


def check_hooks() -> None:
    """Raise ValueError unless SGLang has each hooked function, with the parameters of its hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registered = ((target, *hook) for target, own in HookRegistry._hooks.items() for hook in own)
    for target, kind, hook, _ in registered:
        if not hook.__module__.startswith("areal_lite."):
            continue
        # The first one is SGLang's function, or its result.
        parameters = list(signature(hook).parameters.values())[kind != HookType.REPLACE :]
        known = [each.name for each in parameters if each.kind not in _REST]
        try:
            found = list(signature(resolve_name(target)).parameters)
        except (ModuleNotFoundError, AttributeError):
            found = None
        same = found is not None and [name for name in found if name in known] == known
        if not same or (len(known) == len(parameters) and found != known):
            here = metadata.version("sglang")
            (pin,) = (pin for pin in metadata.requires("areal-lite") or () if pin[:6] == "sglang")
            raise ValueError(
                f"SGLang {here} has {target} with the parameters {found}, and areal_lite hooks it "
                f"with {known}: install {pin.partition(';')[0]}"
            )


def hooks() -> dict[str, Callable]:
    """Return the functions that run around SGLang's, by its names."""
    return {
        f"{_UPDATER}.init_weights_update_group": _join_group,
        f"{_UPDATER}.destroy_weights_update_group": _leave_group,
        f"{_UPDATER}.receive_weights_from_distributed": _receive_weights,
        f"{_SCHEDULER}.pause_generation": _finish_forward_pass,
        f"{_SCHEDULER}.continue_generation": _continue_unless_parked,
        f"{_SCHEDULER}._record_scheduler_state_for_paused_engine": _rest_while_parked,
        f"{_PARKING}.release_memory_occupation": _release_once,
        f"{_PARKING}.resume_memory_occupation": _resume_once,
        f"{_SCHEDULER}.record_weight_version_change": _tag_pending_tokens,
        f"{_SCHEDULER}._get_new_batch_prefill_raw": compute_shared_once,
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager._update_model_path_info": _keep_name,
        "sglang.srt.layers.sampler.Sampler._sample_from_probs": _sample_by_token,
        f"{_MANAGERS}.schedule_batch.release_req": _keep_routes,
        f"{_RESULTS}._maybe_collect_routed_experts": _return_kept_routes,
        f"{_RUNNER}.resolve_sliding_window_size": _see_whole_window,
        **({_READ: _read_weight} if os.environ.get(ENV_READBACK) == "1" else {}),
    }


def _keep_name(original: Callable, self: Any, *args: Any) -> None:
    """Record new weights from a folder. SGLang would call the model by that folder from then on."""
    name = self.served_model_name
    original(self, *args)
    self.served_model_name = name


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
    if not group_name.startswith(weight_group.GROUP_PREFIX):
        where = (master_address, master_port, rank_offset, world_size)
        return original(self, *where, group_name, backend)
    rank = rank_offset + self.tp_rank
    try:
        store = weight_group.connect(master_address, master_port, _LIMIT)
        self._model_update_group[group_name] = weight_group.GroupMember(
            store, backend, world=world_size, rank=rank, name=group_name, limit=_LIMIT
        )
    except Exception as error:
        return False, f"{weight_group.JOIN_FAILED} {group_name}: {error}"
    return True, f"joined weight group {group_name}"


def _leave_group(original: Callable, self: Any, group_name: str) -> tuple[bool, str]:
    """Leave a weight group. It succeeds if this server has left already."""
    if not group_name.startswith(weight_group.GROUP_PREFIX):
        return original(self, group_name)
    if (member := self._model_update_group.pop(group_name, None)) is not None:
        member.abort()
    return True, f"left weight group {group_name}"


def _receive_weights(
    original: Callable, self: Any, *, group_name: str, **request: Any
) -> Iterable[tuple[str, Any]]:
    """Receive one flattened bucket and return its weights by name. A failure ends the group."""
    member = self._model_update_group.get(group_name)
    if not isinstance(member, weight_group.GroupMember):
        return original(self, group_name=group_name, **request)
    form, *codes = request["load_format"].split(":")
    bucket = Layout(request["names"], request["dtypes"], request["shapes"])
    try:
        return formats[form](self, bucket, partial(_receive, member, self.device), *codes)
    except Exception:
        self._model_update_group.pop(group_name).abort()
        raise


class Layout:
    """The tensors of a bucket, one after the other."""

    def __init__(self, names: list[str], dtypes: list[Any], shapes: list[Any]):
        self.names = names
        self._dtypes = [d if isinstance(d, torch.dtype) else getattr(torch, d) for d in dtypes]
        self._shapes = [torch.Size(shape) for shape in shapes]
        pairs = zip(self._shapes, self._dtypes, strict=True)
        self._sizes = [shape.numel() * dtype.itemsize for shape, dtype in pairs]
        self.nbytes = sum(self._sizes)

    def split(self, data: torch.Tensor) -> list[Named]:
        """Return the tensors by name, as views of `data`, uint8 [nbytes]."""
        parts = zip(self.names, data.split(self._sizes), self._dtypes, self._shapes, strict=True)
        return [(name, part.view(dtype).reshape(shape)) for name, part, dtype, shape in parts]


def _receive(member: Any, device: str, nbytes: int) -> torch.Tensor:
    """Receive uint8 [nbytes] from the trainer."""
    data = empty_bucket(nbytes, dtype=torch.uint8, device=device)
    asked_at = time.monotonic()

    def given_up() -> bool:
        nonlocal asked_at
        if time.monotonic() - asked_at < _ASK_EVERY_S:
            return False
        asked_at = time.monotonic()
        return member.store_closed()

    member.broadcast(data, given_up)
    return data


def _finish_forward_pass(original: Callable, self: Any, recv_req: Any) -> Any:
    """Pause, and in mode `in_place` wait until this rank's GPU is idle, as every rank does."""
    result = original(self, recv_req)
    if recv_req.mode == "in_place" and self.enable_overlap:
        wait_for_streams(self)
    return result


def _continue_unless_parked(original: Callable, self: Any, recv_req: Any) -> None:
    if not self.weight_updater.offload_tags:
        original(self, recv_req)


def _rest_while_parked(original: Callable, self: Any) -> None:
    """Leave the core to the trainer: a paused scheduler asks for requests without a rest."""
    original(self)
    if self.weight_updater.offload_tags:
        time.sleep(_PARKED_REST_S)


def _release_once(original: Callable, self: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    recv_req.tags = [tag for tag in recv_req.tags if tag not in self.offload_tags]
    return original(self, recv_req) if recv_req.tags else ReleaseMemoryOccupationReqOutput()


def _resume_once(original: Callable, self: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    recv_req.tags = [tag for tag in recv_req.tags if tag in self.offload_tags]
    return original(self, recv_req) if recv_req.tags else ResumeMemoryOccupationReqOutput()


def wait_for_streams(scheduler: Any) -> None:
    """Wait until a scheduler's device is idle. A device without streams replaces this."""
    scheduler.forward_stream.synchronize()
    scheduler.schedule_stream.synchronize()


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


def adapted_weights(tensors: list[Named], folder: str, scale: float) -> Iterator[Named]:
    """Yield W + SCALE * B A of every adapted weight of a bucket.

    W is from the server's checkpoint in `folder`, from which the trainer started, too. `tensors`
    are A [rank, in] and B [out, rank] of each weight, named as in PEFT; `scale` is alpha / rank. A
    sum has the dtype of A, and is computed in float32 and rounded once. Raises ValueError for
    tensors that do not fit the checkpoint.
    """
    readers, named = _readers(folder), dict(tensors)
    for name, a in tensors:
        stem, factor, _ = name.rpartition(".lora_A.weight")
        if not factor:
            continue
        weight, b = f"{stem}.weight", named[f"{stem}.lora_B.weight"]
        if weight not in readers:
            raise ValueError(f"{folder} has no {weight}, which an adapter of the push adapts")
        base, shape = readers[weight].get_tensor(weight), (len(b), a.shape[1])
        if base.shape != shape:
            raise ValueError(
                f"{folder}: {weight} has shape {list(base.shape)}, and its adapter is for "
                f"{list(shape)}: start servers and trainer from one model"
            )
        yield weight, _add(base, a, b, scale)


Take = Callable[[int], torch.Tensor]  # receives so many bytes from the trainer, uint8


def _whole(updater: Any, bucket: Layout, take: Take) -> list[Named]:
    return bucket.split(take(bucket.nbytes))


def _adapted(updater: Any, bucket: Layout, take: Take, scale: str) -> Iterator[Named]:
    tensors = _whole(updater, bucket, take)
    return adapted_weights(tensors, updater.model_config.model_path, float(scale))


formats: dict[str, Callable[..., Iterable[Named]]] = {
    "flattened_bucket": _whole,
    weight_group.ADAPTERS: _adapted,
}
"""By the word with which a request's `load_format` begins: how to receive a bucket's weights.

A function gets the updater, the bucket, a `Take`, and the rest of `load_format`. Another plugin
may add its own.
"""


def _add(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute W + scale * B A on the device of A, a few rows at a time."""
    exact = torch.promote_types(a.dtype, torch.float32)
    weight = weight.to(a.device, a.dtype)
    result = torch.empty_like(weight)
    rows = max(_AT_A_TIME // weight.shape[1], 1)
    for own, part, out in zip(weight.split(rows), b.split(rows), result.split(rows)):
        out.copy_(torch.addmm(own.to(exact), part.to(exact), a.to(exact), alpha=scale))
    return result


@cache
def _readers(folder: str) -> dict[str, Any]:
    """Map each tensor of a checkpoint to the open file that has it, which is read when asked."""
    return open_tensors(weight_files(Path(folder)), "pt")


def _read_weight(original: Callable, self: Any, name: str, truncate_size: int = 100) -> list | None:
    """Return the first rows of a parameter as nested lists of floats; None if it is unknown."""
    found = dict(self.get_model().named_parameters())
    parameter = found.get(name, found.get(name.replace(".self_attn", "")))  # Qwen3-Next's name
    return None if parameter is None else parameter[:truncate_size].float().cpu().tolist()


def _sample_by_token(
    original: Callable,
    self: Any,
    probs: Any,
    sampling_info: Any,
    positions: Any,
    simple_sampling_case: bool,
) -> tuple[Any, Any]:
    """Sample seeded requests over the whole vocabulary by token, greedy ones without noise."""
    from sglang.srt.layers.sampler import sampling_from_probs_torch
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    info = sampling_info
    tokens, capture = original(self, probs, info, positions, simple_sampling_case)
    if simple_sampling_case or info.sampling_seed is None:
        return tokens, capture
    seeded = sampling_from_probs_torch(probs, info.sampling_seed, positions)
    whole = (info.top_ks == TOP_K_ALL) & (info.top_ps == 1)
    tokens = torch.where(whole, seeded, tokens)
    return torch.where(info.top_ks == 1, probs.argmax(-1).to(tokens.dtype), tokens), capture


def _keep_routes(original: Callable, *, req: Any, req_to_token_pool: Any, **rest: Any) -> bool:
    """Retract a request, and keep the routes with which its tokens were sampled."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    capturer = get_global_experts_capturer()
    if req.return_routed_experts and capturer is not None and req.output_ids:
        kept = getattr(req, "kept_routes", None)
        first = req.routed_experts_start_len + (0 if kept is None else len(kept))
        newer = capturer.get_topk(
            req_pool_idx=req.kv.req_pool_idx,
            seqlen=len(req.origin_input_ids) + len(req.output_ids),
            req_to_token_pool=req_to_token_pool,
            start_len=first,
        )
        req.kept_routes = newer if kept is None else torch.cat((kept, newer))
    return original(req=req, req_to_token_pool=req_to_token_pool, **rest)


def _return_kept_routes(original: Callable, self: Any, req: Any) -> None:
    """Collect the routes of a finished request, with the kept ones for its first tokens."""
    original(self, req)
    kept = getattr(req, "kept_routes", None)
    if kept is not None and req.routed_experts is not None:
        count = min(len(kept), len(req.routed_experts))
        req.routed_experts[:count] = kept[:count]


def _see_whole_window(original: Callable, *args: Any, **named: Any) -> int | None:
    """Return the number of tokens before its own that a token sees; for Triton, with its own."""
    from sglang.srt.runtime_context import attention_backends

    size, (_, decode) = original(*args, **named), attention_backends()
    return size + 1 if size and size > 0 and decode == "triton" else size
