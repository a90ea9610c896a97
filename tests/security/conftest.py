"""A process and a folder of the same user that an attack must leave as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

# Of a file's lstat: all but the time of the last access, which reading it here changes.
_LASTING = ("st_mode", "st_ino", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_ctime_ns")
_STATUS = ("Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "Cpus_allowed")


def _lasting(path: Path) -> tuple[int, ...]:
    status = path.lstat()
    return tuple(getattr(status, name) for name in _LASTING)


@dataclass(frozen=True)
class Victim:
    """A sleeping process and a folder with one file."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def state(self) -> dict[str, object]:
        """Return what an attack could change."""
        process = psutil.Process(self.pid)
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        files = {
            str(path): (_lasting(path), path.is_file() and path.read_bytes())
            for path in (self.folder, *sorted(self.folder.rglob("*")))
        }
        return {
            "ended": self.process.poll(),
            "status": {name: status[name].strip() for name in _STATUS},
            "stopped": process.status() == psutil.STATUS_STOPPED,
            "nice": process.nice(),
            "io priority": process.ionice(),
            "affinity": process.cpu_affinity(),
            "limits": Path(f"/proc/{self.pid}/limits").read_text(),
            "group": (os.getpgid(self.pid), os.getsid(self.pid)),
            "scheduling": os.sched_getscheduler(self.pid),
            "files": files,
        }


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("untouched")
    code = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout
    process.stdout.readline()
    try:
        yield Victim(process, folder)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
