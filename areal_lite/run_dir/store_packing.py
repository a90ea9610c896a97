"""Arrays and texts as the store keeps them: compressed without loss.

Items of four bytes are split into byte planes: the first byte of every item, then the second byte
of every item, and so on. The high bytes of ids and the exponents of log-probs are alike, so zlib
(RFC 1950) makes them small. The low bytes of log-probs are noise, in which a search for repetitions
finds none and takes twice the time. Log-probs therefore get Huffman codes and runs only (`Z_RLE`).

The experts of a route ascend, so each is kept as its distance from the one before, and those of
one layer and place stand together. Distances are small and need fewer bits. They get Huffman codes,
too.

`benchmarks/store.py` measures the bytes per token and the time.
"""

import math
import zlib

import msgspec
import numpy as np

from areal_lite.routes import DTYPES

_ITEM_BYTES = 4
_LEVEL = 1
_TEXTS = msgspec.msgpack.Decoder(tuple[str | None, str | None])
# Texts are expanded to at most this many bytes.
_MAX_TEXT_BYTES = 2**30
_ROUTES = msgspec.msgpack.Decoder(tuple[tuple[str, tuple[int, int, int]], bytes])
# The routes of a token have at most this many bytes.
_MAX_ROUTE_BYTES = 2**16


def pack_tokens(tokens: np.ndarray) -> bytes:
    """Compress token ids, int32 [L]."""
    return zlib.compress(_planes(tokens.astype(np.int32, copy=False)), _LEVEL)


def pack_logprobs(logprobs: np.ndarray) -> bytes:
    """Compress log-probs, float32 [L], bit for bit."""
    return _huffman(_planes(logprobs.astype(np.float32, copy=False)))


def unpack(packed: bytes, dtype: type, length: int) -> np.ndarray:
    """Return the array of `length` items of `dtype`. Raises ValueError for any other content."""
    planes = _expand(packed, _ITEM_BYTES * length)
    if len(planes) != _ITEM_BYTES * length:
        raise ValueError(f"{len(planes)} bytes are packed, not those of {length} tokens")
    items = np.frombuffer(planes, np.uint8).reshape(_ITEM_BYTES, length).T
    return np.ascontiguousarray(items).view(dtype).reshape(length)


def pack_routes(routes: np.ndarray | None) -> bytes | None:
    """Compress routes, [L, layers, top_k] of uint8 or uint16; None if there are none."""
    if routes is None:
        return None
    steps = routes.copy()
    steps[..., 1:] -= routes[..., :-1]  # where it wraps, so does the sum
    header = (routes.dtype.name, routes.shape)
    return msgspec.msgpack.encode((header, _huffman(steps.transpose(1, 2, 0).tobytes())))


def unpack_routes(packed: bytes | None, length: int) -> np.ndarray | None:
    """Return the routes of `length` tokens. Raises ValueError for any other content."""
    if packed is None:
        return None
    (dtype, shape), content = _ROUTES.decode(packed)
    if dtype not in [known.name for known in DTYPES] or shape[0] != length or min(shape[1:]) < 1:
        raise ValueError(f"routes of {dtype}{list(shape)} are packed, not those of {length} tokens")
    count = math.prod(shape) * np.dtype(dtype).itemsize
    if count > _MAX_ROUTE_BYTES * length or len(steps := _expand(content, count)) != count:
        raise ValueError(f"the packed routes are not those of {length} tokens")
    planes = np.frombuffer(steps, dtype).reshape(*shape[1:], length)
    return np.cumsum(planes.transpose(2, 0, 1), axis=-1, dtype=dtype)


def pack_texts(prompt: str | None, completion: str | None) -> bytes | None:
    """Compress the texts of a trajectory; None if it has none."""
    if prompt is None and completion is None:
        return None
    return zlib.compress(msgspec.msgpack.encode((prompt, completion)), _LEVEL)


def unpack_texts(packed: bytes | None) -> tuple[str | None, str | None]:
    """Return prompt and completion. Raises ValueError for any other content."""
    return (None, None) if packed is None else _TEXTS.decode(_expand(packed, _MAX_TEXT_BYTES))


def _huffman(content: bytes) -> bytes:
    coder = zlib.compressobj(_LEVEL, strategy=zlib.Z_RLE)
    return coder.compress(content) + coder.flush()


def _planes(items: np.ndarray) -> bytes:
    return items.view(np.uint8).reshape(-1, _ITEM_BYTES).T.tobytes()


def _expand(packed: bytes, most: int) -> bytes:
    """Expand zlib data to at most `most` bytes. Raises ValueError for more, and for other data."""
    expander = zlib.decompressobj()
    try:
        content = expander.decompress(packed, most + 1)
    except zlib.error as error:
        raise ValueError(f"a packed column is damaged: {error}") from error
    if len(content) > most or not expander.eof:
        raise ValueError("a packed column is damaged: it is too long or incomplete")
    return content
