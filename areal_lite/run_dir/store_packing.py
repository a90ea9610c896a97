"""Arrays and texts as the store keeps them: compressed without loss.

Items of four bytes are split into byte planes: the first byte of every item, then the second byte
of every item, and so on. The high bytes of ids and the exponents of log-probs are alike, so zlib
(RFC 1950) makes them small. The low bytes of log-probs are noise, in which a search for repetitions
finds none and takes twice the time. Log-probs therefore get Huffman codes and runs only (`Z_RLE`).

`benchmarks/store.py` measures the bytes per token and the time.
"""

import zlib

import msgspec
import numpy as np

_ITEM_BYTES = 4
_LEVEL = 1
_TEXTS = msgspec.msgpack.Decoder(tuple[str | None, str | None])
# Texts are expanded to at most this many bytes.
_MAX_TEXT_BYTES = 2**30


def pack_tokens(tokens: np.ndarray) -> bytes:
    """Compress token ids, int32 [L]."""
    return zlib.compress(_planes(tokens.astype(np.int32, copy=False)), _LEVEL)


def pack_logprobs(logprobs: np.ndarray) -> bytes:
    """Compress log-probs, float32 [L], bit for bit."""
    coder = zlib.compressobj(_LEVEL, strategy=zlib.Z_RLE)
    return coder.compress(_planes(logprobs.astype(np.float32, copy=False))) + coder.flush()


def unpack(packed: bytes, dtype: type, length: int) -> np.ndarray:
    """Return the array of `length` items of `dtype`. Raises ValueError for any other content."""
    planes = _expand(packed, _ITEM_BYTES * length)
    if len(planes) != _ITEM_BYTES * length:
        raise ValueError(f"{len(planes)} bytes are packed, not those of {length} tokens")
    items = np.frombuffer(planes, np.uint8).reshape(_ITEM_BYTES, length).T
    return np.ascontiguousarray(items).view(dtype).reshape(length)


def pack_texts(prompt: str | None, completion: str | None) -> bytes | None:
    """Compress the texts of a trajectory; None if it has none."""
    if prompt is None and completion is None:
        return None
    return zlib.compress(msgspec.msgpack.encode((prompt, completion)), _LEVEL)


def unpack_texts(packed: bytes | None) -> tuple[str | None, str | None]:
    """Return prompt and completion. Raises ValueError for any other content."""
    return (None, None) if packed is None else _TEXTS.decode(_expand(packed, _MAX_TEXT_BYTES))


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
