"""The trainer's checkpoints, in Megatron's format (docs/checkpoints.md). Invariants:

* A folder has its final name only when every rank's part is in it and on disk. An interrupted save
  leaves a hidden folder, never a bad checkpoint.
* The state is that of the moment of `save`, although it is written during training. A thread
  on each rank writes a copy in host memory; training waits for the copy only. Megatron would fork
  a process, which would outlive a killed trainer and write where the next trainer writes, and
  could inherit locks held by the threads of gloo, OpenMP and CUDA.
* All ranks make the same calls, from the main thread.
* A checkpoint is data: reading one never runs code that somebody put into it. torch unpickles its
  `.metadata`, and small objects beside the tensors. Only the classes that
  `torch.distributed.checkpoint` itself writes are allowed there.

Machines need not see each other's files: rank 0 gets what the others have written, and publishes a
whole checkpoint. A resume waits until each machine has a copy of it.
"""

import logging
import pickle
import shutil
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum, EnumMeta
from functools import partial
from itertools import chain
from pathlib import Path, PosixPath
from queue import Queue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from areal_lite.config import LoraConfig
from areal_lite.megatron.model import Chunks
from areal_lite.megatron.optimizer import moments
from areal_lite.megatron.parallel import on_every_rank
from areal_lite.megatron.policy import TrainableModel
from areal_lite.run_dir.paths import CHECKPOINT_MARKER
from areal_lite.run_dir.resume import checkpoint_steps, checksum, latest_checkpoint, write_manifest
from areal_lite.system.files import publish_folder, reading, remove_unread, scratch_folder
from areal_lite.system.processes import environment

log = logging.getLogger(__name__)
_CHUNK = 64 << 20  # bytes of a file in one message between ranks
_POLL_S = 0.2
# Experts that ranks share have an optimizer of their own. Its tensors are named as without it.
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class PendingCheckpoint:
    """A checkpoint of the state at construction, being written. Every rank makes the same calls."""

    def __init__(self, folder: Path, parts: Mapping[str, TrainableModel], extra: dict[str, Any]):
        self.folder = folder
        if dist.get_rank() == 0:
            scratch_folder(folder)
        dist.barrier()
        self.scratch = scratch_folder(folder, empty=False)  # rank 0's, if this machine sees it
        state = sharded_state(parts, is_loading=False)
        state |= {"random": torch.get_rng_state(), "extra": extra}
        # Megatron would start a manager process for this queue, which never leaves our process.
        filesystem_async._results_queue = Queue()
        request: Any = dist_checkpointing.save(
            state,
            str(self.scratch),
            sharded_strategy=TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
            async_sharded_save=True,
            content_metadata=FORMAT,
        )
        self.request: AsyncRequest = request
        # Checksums of the files that this rank writes. Only its thread changes them.
        self.checksums: dict[str, int] = {}
        self.thread: Thread | None = None
        if request.async_fn is not None:  # this rank has something to write
            _, _, results = request.async_fn_args
            transforms, _ = request.async_fn.args
            args = (transforms, _host_copy(request, parts), results, self.checksums)
            self.thread = Thread(target=_write, args=args, daemon=True)
            self.thread.start()

    def written(self) -> bool:
        """Return whether every rank has written its part."""
        return on_every_rank(self.thread is None or not self.thread.is_alive())

    def publish(self) -> None:
        """Wait until everything is written, then give the folder its name.

        Raises RuntimeError, on every rank, when any rank could not write.
        """
        if self.thread is not None:
            self.thread.join()
        try:
            for finalize in self.request.finalize_fns:
                finalize()
        # It is not an Exception, and only rank 0 knows the details.
        except CheckpointException as error:
            raise RuntimeError(
                f"{self.folder}: this checkpoint could not be written; {error}"
            ) from error
        checksums: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(checksums, self.checksums)
        self._bring(checksums)
        if dist.get_rank() == 0:
            write_manifest(self.scratch, dict(ChainMap(*checksums)))
            publish_folder(self.scratch, self.folder)
        dist.barrier()
        shutil.rmtree(self.scratch, ignore_errors=True)  # of another machine than rank 0's

    def _bring(self, written: list[dict[str, int]]) -> None:
        """Copy to rank 0 the files that its machine does not see. `written`: names by rank."""
        named = [(rank, name) for rank, names in enumerate(written) for name in names]
        unseen: list[Any] = [[one for one in named if not (self.scratch / one[1]).exists()]]
        dist.broadcast_object_list(unseen)
        for rank, name in unseen[0]:
            if dist.get_rank() == rank:
                with open(self.scratch / name, "rb") as file:
                    for data in chain(iter(partial(file.read, _CHUNK), b""), [b""]):
                        dist.send_object_list([data], 0)
            elif dist.get_rank() == 0:
                # A network file system may show a file late: then this must not truncate it.
                with open(arrives := self.scratch / f"{name}.partial", "wb") as file:
                    while data := _received(rank):
                        file.write(data)
                arrives.rename(self.scratch / name)


def _received(rank: int) -> bytes:
    data: list[Any] = [None]
    dist.recv_object_list(data, rank)
    return data[0]


class Checkpoints:
    """A run's checkpoints, `folder`/step-N, of which at most one is being written.

    The `keep` newest stay (0: all), and any that a process is reading.
    """

    def __init__(self, folder: Path, parts: Mapping[str, TrainableModel], keep: int = 0):
        self.folder = folder
        self.parts = parts
        self.keep = keep
        self.pending: PendingCheckpoint | None = None
        # Remove what killed runs left.
        for leftover in chain(folder.glob(".step-*.partial"), folder.glob(".step-*.old")):
            shutil.rmtree(leftover, ignore_errors=True)
        dist.barrier()

    def save(self, step: int, extra: dict[str, Any]) -> None:
        """Start to write the current state and `extra` (plain data), after the previous one."""
        self.wait()
        self.pending = PendingCheckpoint(self.folder / f"step-{step}", self.parts, extra)

    def poll(self) -> None:
        """Publish the pending checkpoint if it is written. Never waits."""
        if self.pending and self.pending.written():
            self.wait()

    def wait(self) -> None:
        """Wait until the pending checkpoint is published, then remove obsolete ones."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        pending.publish()
        if dist.get_rank() == 0:
            for step in checkpoint_steps(self.folder)[: -self.keep]:  # none with keep=0
                remove_unread(self.folder / f"step-{step}" / CHECKPOINT_MARKER)

    def resume(self) -> int:
        """Restore rank 0's newest checkpoint, if any; return the step to continue from."""
        newest: list[Any] = [latest_checkpoint(self.folder)]
        dist.broadcast_object_list(newest)
        if newest[0] is None:
            return 0
        marker = self.folder / newest[0].name / CHECKPOINT_MARKER
        if not marker.exists():
            log.warning("this machine waits for its copy of %s", marker.parent)
        while not on_every_rank(marker.exists()):
            time.sleep(_POLL_S)
        return load_checkpoint(marker.parent, self.parts)["step"]


@torch.no_grad()
def load_checkpoint(folder: Path, parts: Mapping[str, TrainableModel]) -> dict[str, Any]:
    """Restore the state in `folder`; return its `extra`. Every rank calls it.

    The schedule keeps its position and takes this configuration's shape.
    Raises ValueError when the folder is not a checkpoint of these parts, or holds more than data.
    """
    with _opened(folder):
        common = dist_checkpointing.load_common_state_dict(str(folder))
        check_state(folder, common, parts)
        state: Any = dist_checkpointing.load(sharded_state(parts, is_loading=True), str(folder))
    for name, part in parts.items():
        part.model.load_state_dict(state[name]["model"])
        part.optimizer.load_state_dict(state[name]["optimizer"])
        for each in moments(part.optimizer):
            if "step" in each:
                each["step"] = torch.full_like(each["step"], state[name]["updates"])
        part.scheduler.num_steps = 0  # loading adds the position to it
        part.scheduler.load_state_dict(state[name]["scheduler"])
    torch.set_rng_state(state["random"])
    return state["extra"]


@torch.no_grad()
def load_weights(folder: Path, part: str, model: Chunks) -> None:
    """Set the weights of `model` to those of one part of the checkpoint in `folder`.

    Raises ValueError when the folder is not a checkpoint of such a part, or holds more than data.
    """
    with _opened(folder):
        state = {"model": model.sharded_state_dict(metadata=format_metadata())}
        add_prefix_for_sharding(state, f"{part}.")
        try:
            loaded: Any = dist_checkpointing.load(state, str(folder))
        except CheckpointingException as error:
            raise ValueError(f"{folder}: not a checkpoint of this model ({error})") from error
    model.load_state_dict(loaded["model"])


def stored_part(folder: Path, part: str) -> tuple[torch.dtype, LoraConfig]:
    """Return the dtype of the weights of one part, and its adapters (of rank 0 if it has none).

    Raises ValueError when the folder is not a checkpoint that has this part.
    """
    with _opened(folder):
        common = dist_checkpointing.load_common_state_dict(str(folder))
        tensors = dist_checkpointing.load_tensors_metadata(str(folder))
    dtypes = [
        tensor.dtype
        for name, tensor in tensors.items()
        if name.startswith(f"{part}.") and not name.startswith(f"{part}.optimizer.")
        if isinstance(tensor, ShardedTensor)
    ]
    if part not in common or not dtypes:
        raise ValueError(f"{folder}: this checkpoint holds no {part}")
    return dtypes[0], LoraConfig(**(common[part]["lora"] or {}))


@contextmanager
def _opened(folder: Path) -> Iterator[None]:
    """Protect a checkpoint from its removal and let torch read it as data only.

    Raises ValueError when the folder is not a checkpoint.
    """
    marker = folder / CHECKPOINT_MARKER
    if not marker.is_file():
        raise ValueError(f"{folder}: not a trainer checkpoint")
    with reading(marker), only_data(folder):
        yield


def _host_copy(request: AsyncRequest, parts: Mapping[str, TrainableModel]) -> list:
    """Return Megatron's write buckets, in host memory and without tensors that change."""
    live = {
        tensor.untyped_storage().data_ptr()
        for part in parts.values()
        for tensor in chain(
            part.model.parameters(),
            part.model.buffers(),
            *(one.get_parameters() for one in part.optimizer.chained_optimizers),
            *(state.values() for state in moments(part.optimizer)),
        )
    }

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor

    assert request.preload_fn is not None
    return [
        (file, key, (others, [(item, copy(tensor)) for item, tensor in tensors]))
        for file, key, (others, tensors) in request.preload_fn()
    ]


def _write(transforms: list, buckets: list, results: Queue, checksums: dict[str, int]) -> None:
    """Write and flush `buckets`, and put the checksum of each file into `checksums`.

    `results` receives what Megatron expects of its writer processes, or the exception of a write.
    """
    written: dict[int, list] = {}
    for index, bucket in enumerate(buckets):
        # Megatron's annotations name multiprocessing's queues; within a process these do.
        outcome: Any = Queue()
        running: Any = Queue()
        running.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, outcome, running, use_fsync=True
        )
        _, written[index] = outcome.get()
        if isinstance(written[index], Exception):
            return results.put(written[index])
        file = Path(bucket[0])
        try:
            checksums[file.name] = checksum(file)
        except OSError as error:
            return results.put(error)
    results.put(written)


def format_metadata() -> dict[str, Any]:
    """Return what Megatron needs to shard a state."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FORMAT | {"dp_cp_group": group}


def sharded_state(parts: Mapping[str, TrainableModel], is_loading: bool) -> dict[str, Any]:
    """Return the state of all parts by name, to be saved or to be filled. Every rank calls it."""
    sharding = format_metadata()
    state: dict[str, Any] = {}
    for name, part in parts.items():
        _make_moments(part.optimizer)
        model = part.model.sharded_state_dict(metadata=sharding)
        optimizer = part.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=sharding
        )
        steps = (int(each["step"]) for each in moments(part.optimizer) if "step" in each)
        state[name] = {
            "model": model,
            "optimizer": _tensors_alone(optimizer),
            "updates": next(steps, 0),
            "optimizer_name": part.config.optimizer,
            "lora": asdict(part.config.lora) if part.config.lora.rank else None,
            "scheduler": part.scheduler.state_dict(),
        }
        add_prefix_for_sharding(state[name], f"{name}.")
    return state


def _make_moments(optimizer: Any) -> None:
    """Make the moments of Adam, as zeros. There are none before the first update."""
    for one in optimizer.chained_optimizers:
        one.init_state_fn(one.optimizer)
        if isinstance(one.optimizer, torch.optim.AdamW):
            for parameter, made in one.optimizer.state.items():
                made.setdefault("step", parameter.new_zeros(()))


def _tensors_alone(state: Any) -> Any:
    """Let only the tensors of a state be saved and loaded: all else stays as configured."""
    parts = nested_values(state) if isinstance(state, dict | list) else [state]
    if not any(isinstance(part, ShardedBase) for part in parts):
        return LocalNonpersistentObject(dict_list_map_outplace(_unwrapped, state))
    if isinstance(state, dict):
        return {key: _tensors_alone(value) for key, value in state.items()}
    return state


def _unwrapped(value: Any) -> Any:
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value


def check_state(folder: Path, common: dict[str, Any], parts: Mapping[str, TrainableModel]) -> None:
    """Raise ValueError if `common`, a checkpoint's state without tensors, is not of these parts."""
    if missing := parts.keys() - common.keys():
        raise ValueError(f"{folder}: this checkpoint holds no {', '.join(sorted(missing))}")
    for name, part in parts.items():
        lora = part.config.lora
        wrote = {"optimizer": common[name]["optimizer_name"], "lora": common[name]["lora"]}
        has = {"optimizer": part.config.optimizer, "lora": asdict(lora) if lora.rank else None}
        for key in wrote:
            if wrote[key] != has[key]:
                raise ValueError(
                    f"{folder}: this checkpoint was written with trainer.{key}="
                    f"{wrote[key] or 'off'} and cannot be continued with {has[key] or 'off'}: set "
                    "the same, or start a new run from the checkpoint's weights (areal-lite export)"
                )


_METADATA_FILE = ".metadata"

_CLASSES: dict[tuple[str, str], Any] = {
    (allowed.__module__, allowed.__qualname__): allowed
    for allowed in (
        PosixPath,  # where the checkpoint was written
        torch.Size,
        torch.serialization._get_layout,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
        planner.WriteItemType,
        _StorageInfo,
    )
}


def _member(kind: type[Enum], name: str) -> Enum:
    """Return the member `name` of an enumeration. No other object has attributes here."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise ValueError("it names builtins.getattr, which no checkpoint does")
    return kind[name]


# Python 3.11.0 to 3.11.3 pickle the member of an enumeration as a call of getattr.
_NAMES = _CLASSES | {("builtins", "getattr"): _member}


def _refuse(_: pickle.Unpickler) -> None:
    raise ValueError("it numbers what it remembers itself, which no checkpoint does")


class _MetadataUnpickler(pickle._Unpickler):
    """Reads the metadata, and nothing else. Only the unpickler in Python lets refuse opcodes."""

    # The one in C would make a table of up to 2^32 entries for one of these.
    dispatch = pickle._Unpickler.dispatch | dict.fromkeys(
        (pickle.PUT[0], pickle.BINPUT[0], pickle.LONG_BINPUT[0]), _refuse
    )

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        try:
            return _NAMES[module, name]
        except KeyError:
            raise ValueError(f"it names {module}.{name}, which no checkpoint does") from None


@contextmanager
def only_data(folder: Path) -> Iterator[None]:
    """Let torch read the checkpoint in `folder` inside the block, as data only.

    Raises ValueError if the checkpoint holds anything else, or if its `.metadata` cannot be read.
    """
    try:
        with open(folder / _METADATA_FILE, "rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, metadata.Metadata):
            raise TypeError(f"it is a {type(found).__name__}")
        # Torch's own reading finds damage that the first one lets pass, which has refused all code.
        FileSystemReader(folder).read_metadata()
    except Exception as error:  # a damaged pickle raises errors of many kinds
        raise ValueError(
            f"{folder}: {_METADATA_FILE} is damaged or forged: {_printable(str(error))}"
        ) from error
    try:
        with environment("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
            yield
    except CheckpointException as error:  # it is not an Exception
        cause, _ = next(iter(error.failures.values()))
        raise ValueError(f"{folder} cannot be loaded: {_first_line(cause)}") from error
    except (EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder} cannot be loaded: {_first_line(error)}") from error


def _printable(text: str) -> str:
    """Return text that a damaged file may have written as one line of bounded length."""
    return "".join(c if c.isprintable() else " " for c in text)[:300]


def _first_line(error: BaseException) -> str:
    """Return the name of an error, and the first line of what it says: torch says much."""
    return f"{type(error).__name__}: {_printable(str(error).partition(chr(10))[0])}"
