"""The server's half of `sync.transport=delta`, and the code of a bucket's changes.

A bucket travels as the places and the differences of the int16 that changed (`encode`), and servers
add these to their parameters (docs/servers.md, Changes alone). A difference is of no use to a
server that holds other weights. Each bucket therefore names the bucket before it by a checksum of
all buckets since the last whole weights (`link`).
"""

import struct
import zlib
from typing import Any, NamedTuple

import torch
import xxhash

from areal_lite.sglang_plugins import push
from areal_lite.sglang_plugins.load_plan import COPY, LoadError, Named, record_writes, storage

DELTA = "areal_lite_delta"
"""The format of a request, followed by `:BEFORE:LINK:BYTES`. Whole weights have 0 bytes."""

# An element in so many is sent whether it changed or not: a gap then fits 16 bits.
_EVERY = 2**16
_COUNT = struct.Struct("<Q")
_REMEDY = "use sync.transport=distributed"
_WRONG_STATE = "the server does not hold the weights that have changed: it needs whole ones"


def install() -> None:
    """Register the format of buckets. Entry point of the group `sglang.srt.plugins`."""
    push.formats[DELTA] = receive


def receive(
    updater: Any, bucket: push.Layout, take: push.Take, before: str, after: str, length: str
) -> list[Named]:
    """Receive whole weights, and return them, or add `length` bytes of changes to the model."""
    model = updater.get_model()
    changes = vars(model).setdefault("areal_lite_changes", Changes(model))
    data = take(int(length) or bucket.nbytes)
    if int(length):
        changes.add(before, after, data.cpu().numpy().tobytes(), bucket.names)
        return []
    tensors = bucket.split(data)
    changes.replace(before, after, data, tensors)
    return tensors


def link(before: str, data: bytes) -> str:
    """Return the name of a state of the weights: that of the state before, and its changes."""
    return xxhash.xxh3_128(before.encode() + data).hexdigest()


def encode(old: torch.Tensor, new: torch.Tensor) -> bytes | None:
    """Encode the changes from `old` to `new`: flat uint8 tensors whose length is a multiple of 8.

    The gaps between changed int16 and their differences, wrapped, are split into their low and
    high bytes, and each kind is compressed: most differences are 1 or -1. None: most words of 8
    bytes have changed, and all of `new` is cheaper to send and to take.
    """
    words = old.view(torch.int64) != new.view(torch.int64)
    if 2 * int(words.sum()) > len(words):
        return None
    words[:: _EVERY // 4] = True
    at = (4 * words.nonzero() + torch.arange(4, device=old.device)).view(-1)
    change = new.view(torch.int16)[at] - old.view(torch.int16)[at]
    kept = (change != 0) | (at % _EVERY == 0)
    at, change = at[kept], change[kept]
    gaps = at.diff(prepend=at.new_full((1,), -1)) - 1
    folded = (change << 1) ^ (change >> 15)  # 0, -1, 1, -2 … become 0, 1, 2, 3 …
    planes = torch.stack((gaps.to(torch.int16), folded)).cpu().view(torch.uint8)
    planes = planes.view(2, -1, 2).transpose(1, 2).contiguous()
    # Runs and single bytes: a search for longer repetitions finds none.
    compressor = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return _COUNT.pack(len(at)) + compressor.compress(planes.numpy().data) + compressor.flush()


def decode(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where int16 have changed, int64 in ascending order, and by how much, int16."""
    (count,) = _COUNT.unpack_from(data)
    flat = bytearray(zlib.decompressobj().decompress(data[_COUNT.size :], 4 * count))
    planes = torch.frombuffer(flat, dtype=torch.uint8).view(2, 2, count)
    gaps, folded = planes.transpose(1, 2).reshape(-1).view(torch.int16).view(2, count)
    at = ((gaps.to(torch.int64) & 0xFFFF) + 1).cumsum(0) - 1
    return at, ((folded >> 1) & 0x7FFF) ^ -(folded & 1)


class Changes:
    """The state of a server's weights, and the way of changes into the parameters of `model`."""

    def __init__(self, model: Any):
        self._model = model
        self._state: str | None = None  # None: it takes whole weights only
        self._plans: dict[tuple[str, ...], _Plan] = {}  # by the names of a bucket's weights

    def replace(self, before: str, after: str, data: torch.Tensor, tensors: list[Named]) -> None:
        """Prepare for a bucket of whole weights, views of `data`, which the caller then loads.

        before: the state that the server must be in, empty for any. Raises LoadError if the server
        is in another, or could not take changes to these weights.
        """
        if before and self._state not in (before, after):
            raise LoadError(_WRONG_STATE)
        self._state = None
        self._plans[tuple(name for name, _ in tensors)] = _Plan(self._model, data, tensors)
        self._state = after

    def add(self, before: str, after: str, data: bytes, names: list[str]) -> None:
        """Add the changes of a bucket with weights of these names. Raises LoadError.

        It changes nothing if they were added already: a push takes a bucket again, without the
        servers that failed.
        """
        if self._state == after:
            return
        plan = self._plans.get(tuple(names))
        if self._state != before or plan is None:
            raise LoadError(_WRONG_STATE)
        if link(before, data) != after:
            raise LoadError("the changes of the weights do not have their checksum")
        self._state = None
        plan.add(*decode(data))
        self._state = after


class _Plan:
    """Maps the int16 of a bucket to the parameters of `model`.

    Raises LoadError if a sum would not be what loading gives.
    """

    def __init__(self, model: Any, data: torch.Tensor, tensors: list[Named]):
        places: dict[tuple, _Place] = {}
        for function, args, _ in record_writes(model, tensors):
            if function is not COPY:
                continue
            target, source = args
            if storage(source) != storage(data):
                raise LoadError(f"the server's model computes its weights: {_REMEDY}")
            region = (target.data_ptr(), target.shape, target.stride())
            if region in places:
                raise LoadError(f"the server's model loads a weight twice: {_REMEDY}")
            places[region] = _place(source, target, int(data.storage_offset()))
        self._places = list(places.values())
        ends = [(place.first, place.end) for place in self._places]
        self._ends = torch.tensor(ends, dtype=torch.int64).view(-1)

    def add(self, at: torch.Tensor, change: torch.Tensor) -> None:
        """Add the changes, int16, of the int16 at `at`, int64 in ascending order."""
        ranges = torch.searchsorted(at, self._ends).view(-1, 2).tolist()
        device = self._places[0].target.device if self._places else "cpu"
        at, change = at.to(device), change.to(device)
        for place, (first, end) in zip(self._places, ranges, strict=True):
            if first < end:
                place.add(at[first:end], change[first:end])


class _Place(NamedTuple):
    """A view of the int16 of a bucket, and of the memory to which they belong.

    If the parameter's dtype is wider than the bucket's `dtype`, `target` has its elements.
    """

    first: int
    stride: tuple[int, ...]
    target: torch.Tensor
    dtype: torch.dtype

    @property
    def end(self) -> int:
        sizes = zip(self.target.shape, self.stride, strict=True)
        return self.first + sum((size - 1) * stride for size, stride in sizes) + 1

    def add(self, at: torch.Tensor, change: torch.Tensor) -> None:
        """Add the changes. Some of them may lie between the rows of this view."""
        where = at - self.first
        if self.target.is_contiguous() and self.target.stride() == self.stride:
            flat = self.target.view(-1)
            flat[where] = self._sum(flat[where], change)
        else:
            changes = change.new_zeros(self.end - self.first)
            changes[where] = change
            changes = changes.as_strided(self.target.shape, self.stride)
            self.target.copy_(self._sum(self.target, changes))

    def _sum(self, old: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        if old.dtype is torch.int16:
            return old + change
        return (old.to(self.dtype).view(torch.int16) + change).view(self.dtype).to(old.dtype)


def _place(source: torch.Tensor, target: torch.Tensor, start: int) -> _Place:
    """Return where `source` goes, a view of a bucket that begins at byte `start` of its memory."""
    wide = source.dtype != target.dtype
    if source.itemsize % 2 or (wide and (source.itemsize, target.dtype) != (2, torch.float32)):
        raise LoadError(f"the server holds {target.dtype}, and gets {source.dtype}: {_REMEDY}")
    parts = source.itemsize // 2
    step = 1 if wide else parts
    memory = torch.empty(0, dtype=target.dtype if wide else torch.int16, device=target.device)
    return _Place(
        first=parts * int(source.storage_offset()) - start // 2,
        stride=(*(parts * stride for stride in source.stride()), 1),
        target=memory.set_(
            target.untyped_storage(),
            step * int(target.storage_offset()),
            (*target.shape, parts),
            (*(step * stride for stride in target.stride()), 1),
        ),
        dtype=source.dtype,
    )
