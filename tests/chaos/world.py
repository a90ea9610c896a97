"""A worse world for a run: lost and slow connections, a failing disk, a clock that jumps."""

import ctypes
import mmap
import subprocess
from pathlib import Path

from tests.proxy import Address, Proxy

LIBRARY = Path(__file__).with_name("world.c")
_DELAY_S = 0.15
"""How much longer each piece of data takes while connections are slow, in seconds."""


class _Control(ctypes.Structure):
    """The struct `control` of world.c."""

    _fields_ = [("clock_offset_s", ctypes.c_int64), ("disk_error", ctypes.c_int64)]


class World:
    """The clock, disk and network of the processes that have its `environment`.

    Close it after they have ended.

    Args:
        root: the folder whose disk may fail.
        scratch: a folder for its own files, which is elsewhere.
    """

    def __init__(self, root: Path, scratch: Path):
        library, control = scratch / "world.so", scratch / "control"
        compile_it = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", library, LIBRARY, "-ldl"]
        subprocess.run(compile_it, check=True)
        control.write_bytes(bytes(ctypes.sizeof(_Control)))
        with open(control, "r+b") as file:
            self._control = _Control.from_buffer(mmap.mmap(file.fileno(), 0))
        # All of 127.0.0.0/8 is loopback: the address tells the port (world.c).
        self._proxy = Proxy(_port_in_address, host="0.0.0.0")
        self.environment = {
            "LD_PRELOAD": str(library),
            "CHAOS_CONTROL": str(control),
            "CHAOS_ROOT": f"{root}/",
            "CHAOS_PROXY": str(self._proxy.port),
        }

    def cut(self) -> None:
        """Reset the connections of controller and trainer."""
        self._proxy.cut()

    def slow(self, is_slow: bool) -> None:
        """Let the data on these connections take longer, or as long as before."""
        self._proxy.delay(_DELAY_S if is_slow else 0.0)

    def fail_writes(self, number: int) -> None:
        """Let writes to the disk fail with an errno: it is full, or read-only. 0: it is well."""
        self._control.disk_error = number

    def jump(self, seconds: int) -> None:
        """Move the wall clock."""
        self._control.clock_offset_s += seconds

    def close(self) -> None:
        self._proxy.close()


def _port_in_address(accepted_on: Address) -> Address:
    *_, high, low = map(int, accepted_on[0].split("."))
    return "127.0.0.1", 256 * high + low
