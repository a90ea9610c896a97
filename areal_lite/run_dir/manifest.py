"""The manifest of a checkpoint: the size and the checksum of each of its files.

It is written last, so a folder that has one is complete. A start compares the files with it before
any process reads them: a flipped bit in a tensor would otherwise train on without a sign.
"""

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from areal_lite.run_dir.paths import CHECKPOINT_MARKER

_BLOCK_BYTES = 1 << 22
_THREADS = 8


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file. Other threads run meanwhile."""
    value, block = 0, memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            value = zlib.crc32(block[:size], value)
    return value


def write_manifest(folder: Path, known: Mapping[str, int]) -> None:
    """Write the manifest of the files in `folder`. `known` has checksums that exist already."""
    files = sorted(path for path in folder.iterdir() if path.name != CHECKPOINT_MARKER)
    listed = {
        path.name: (path.stat().st_size, known.get(path.name) or checksum(path)) for path in files
    }
    (folder / CHECKPOINT_MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(listed)))


def damage(folder: Path) -> str:
    """Describe the damage of a checkpoint, by its manifest; "" when it is whole."""
    try:
        content = (folder / CHECKPOINT_MARKER).read_bytes()
        listed = msgspec.json.decode(content, type=dict[str, tuple[int, int]])
    except (OSError, ValueError, RecursionError) as error:
        return f"{CHECKPOINT_MARKER} cannot be read ({error})"
    if not listed:
        return f"{CHECKPOINT_MARKER} names no file"
    for name in listed:
        if "\0" in name or Path(name).name != name:
            return f"{CHECKPOINT_MARKER} lists {name!r:.100}, which is not the name of a file"
    with ThreadPoolExecutor(_THREADS) as pool:
        reasons = pool.map(lambda item: _file_damage(folder / item[0], *item[1]), listed.items())
        return next(filter(None, reasons), "")


def _file_damage(path: Path, size: int, expected: int) -> str:
    try:
        if (found := path.stat().st_size) != size:
            return f"{path.name} has {found} bytes, not {size}"
        return "" if checksum(path) == expected else f"{path.name} has a wrong checksum"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
