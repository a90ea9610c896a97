"""A disk that is rebuilt from a record of writes, as it is after a kill or a power cut.

`record_writes.c` makes the record. A file is durable as of its last sync, and a name as of the last
sync of its folder.
"""

import os
import random
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

RECORDER = Path(__file__).with_name("record_writes.c")


class Write(NamedTuple):
    """One change: the kind (record_writes.c), the path, an offset, and data or another path."""

    kind: str
    path: str
    offset: int
    data: bytes


def recorded(programs: list[str], root: Path, scratch: Path) -> list[Write]:
    """Run Python programs with `root` as their argument; return what they wrote below `root`."""
    library, log = scratch / "recorder.so", scratch / "writes"
    compiled = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", library, RECORDER, "-ldl"]
    subprocess.run(compiled, check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "RECORD_ROOT": str(root),
        "RECORD_LOG": str(log),
    }
    for code in programs:
        subprocess.run([sys.executable, "-c", code, root], env=environment, check=True, timeout=200)
    return _parse(log.read_bytes(), str(root))


def _parse(log: bytes, root: str) -> list[Write]:
    writes, at = [], 0

    def relative(path: str) -> str:
        return os.path.relpath(path, root)

    while at < len(log):
        kind, (length,) = chr(log[at]), struct.unpack_from("<I", log, at + 1)
        path = log[at + 5 : at + 5 + length].decode()
        at += 5 + length
        offset, size = struct.unpack_from("<qI", log, at)
        data = log[at + 12 : at + 12 + size]
        at += 12 + size
        if kind in "rl":
            data = relative(data.decode()).encode()
        writes.append(Write(kind, relative(path), offset, data))
    return writes


@dataclass
class _File:
    """A file: its content, what of it is on disk, and the changes since."""

    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    since: list[Write] = field(default_factory=list)

    def apply(self, write: Write) -> None:
        _change(self.content, write)
        self.since.append(write)

    def sync(self) -> None:
        self.synced, self.since = bytes(self.content), []


def _change(content: bytearray, write: Write) -> None:
    end = write.offset + len(write.data)
    if write.kind == "t":
        del content[write.offset :]
    content.extend(bytes(max(0, end - len(content))))
    content[write.offset : end] = write.data


class Disk:
    """The files below a folder. `names` and `synced` map paths to files; None is a folder."""

    def __init__(self) -> None:
        self.names: dict[str, _File | None] = {".": None}
        self.synced: dict[str, _File | None] = {".": None}

    def apply(self, write: Write) -> None:
        """Make one change."""
        kind, path = write.kind, write.path
        if kind == "s":
            self._sync(path)
        elif kind == "c":
            self.names[path] = _File()
        elif kind == "m":
            self.names.setdefault(path, None)
        elif kind in "ud":
            self.names.pop(path, None)
        elif kind == "l":
            self.names[write.data.decode()] = self.names[path]
        elif kind == "r":
            _move(self.names, path, write.data.decode())
        elif (file := self.names.get(path)) is not None:
            file.apply(write)

    def _sync(self, path: str) -> None:
        file = self.names.get(path)
        if file is not None:
            file.sync()
            return
        for names in (self.synced, self.names):
            inside = {name for name in names if os.path.dirname(name) == path.removeprefix(".")}
            for name in inside - {"."}:
                if name not in self.names:
                    _remove(self.synced, name)
        for name, entry in list(self.names.items()):
            if name != "." and os.path.dirname(name) == path.removeprefix("."):
                moved = entry is None and name not in self.synced
                self.synced[name] = entry
                if moved:  # a folder brings what was synced in it under its earlier name
                    self._adopt(name)

    def _adopt(self, folder: str) -> None:
        synced = {id(entry) for entry in self.synced.values() if entry is not None}
        for name, entry in self.names.items():
            if name.startswith(f"{folder}/") and (entry is None or id(entry) in synced):
                self.synced[name] = entry

    def killed(self) -> dict[str, bytes | None]:
        """Return the files after the death of the process: everything that it wrote."""
        return {name: file and bytes(file.content) for name, file in self.names.items()}

    def cut(self, choose: random.Random | None = None) -> dict[str, bytes | None]:
        """Return the files after a power cut: what was synced.

        With `choose`, also some of the later names, and some of the later changes of each file.
        """
        names = self.synced if choose is None or choose.random() < 0.5 else self.names
        found: dict[str, bytes | None] = {}
        for name, file in names.items():
            if file is None:
                found[name] = None
                continue
            content = bytearray(file.synced)
            for write in file.since if choose is not None else ():
                if choose.random() < 0.6:
                    _change(content, write)
            found[name] = bytes(content)
        return found


def _move(names: dict[str, _File | None], path: str, to: str) -> None:
    _remove(names, to)
    for name in [name for name in names if name == path or name.startswith(f"{path}/")]:
        names[to + name[len(path) :]] = names.pop(name)


def _remove(names: dict[str, _File | None], path: str) -> None:
    for name in [name for name in names if name == path or name.startswith(f"{path}/")]:
        del names[name]


def restore(files: dict[str, bytes | None], root: Path) -> None:
    """Make the files below the new folder `root`. Shared memory does not survive a crash."""
    root.mkdir()
    for name, content in sorted(files.items()):
        if content is None:
            (root / name).mkdir(parents=True, exist_ok=True)
        elif not name.endswith("-shm"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
