"""Check a machine before anything is installed: `python areal_lite/tools/machine.py FOLDER`.

Only the standard library is imported, since this runs before the installation. Each problem is one
line with its remedy. The exit status is 1 if there is one.
"""

import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

PYTHONS = ((3, 11), (3, 13))  # the oldest and the newest that all packages have wheels for
DISK_GB = 3.0
MEMORY_GB = 6.0
SHARED_MEMORY_GB = 0.06


def problems(folder: Path) -> Iterator[str]:
    """Yield a line for each thing that this machine lacks to install and run in `folder`."""
    if sys.platform != "linux":
        yield f"system {sys.platform}: SGLang needs Linux; use a container or WSL"
    oldest, newest = PYTHONS
    if not oldest <= sys.version_info[:2] <= newest:
        yield f"Python {platform.python_version()}: install Python 3.{oldest[1]} to 3.{newest[1]}"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield "no C compiler: install gcc (Debian and Ubuntu: apt install gcc python3-dev)"
    yield from _too_small(f"disk space at {folder}", shutil.disk_usage(folder).free, DISK_GB)
    if (memory := available_memory()) is not None:
        yield from _too_small("available memory", memory, MEMORY_GB)
    if (shared := Path("/dev/shm")).is_dir():
        size, remedy = shutil.disk_usage(shared).total, "; in a container: --shm-size=1g"
        yield from _too_small(str(shared), size, SHARED_MEMORY_GB, remedy)
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        yield f"no port can be opened on 127.0.0.1 ({error}): the roles of a run could not talk"


def available_memory() -> int | None:
    """Return the bytes of memory that can be taken without swapping; None if Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = (line.split() for line in lines)
    return next((int(kb) * 1024 for name, kb, *_ in sizes if name == "MemAvailable:"), None)


def _too_small(what: str, size: int, needed_gb: float, remedy: str = "") -> Iterator[str]:
    if size < needed_gb * 1e9:
        yield f"{what}: {size / 1e9:.2g} GB, and {needed_gb:g} GB are needed{remedy}"


def main(folder: Path) -> int:
    found = list(problems(folder))
    for problem in found:
        print(f"setup: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
