"""Random system calls from inside the sandbox, next to a process and a folder of the same user.

Each program makes a batch of calls with arguments that are likely to matter: numbers of processes,
descriptors, flags, commands, and pointers to paths and structures that hold them. Whatever happens
to the program, others stay as they are, it ends, and nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from areal_lite.rewards.sandbox.run import Limits, run_python
from areal_lite.rewards.sandbox.system_calls import CALLS, number_of

CALLS_PER_PROGRAM = 25
# A call that waits is interrupted, again and again.
PROGRAM = """
import ctypes, os, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.02)
own = {"own": os.getpid(), "parent": os.getppid()}
kept = []
def value(argument):
    if isinstance(argument, str):
        return own[argument]
    if isinstance(argument, bytes):
        kept.append(ctypes.create_string_buffer(argument, 4096))
        return ctypes.addressof(kept[-1])
    return argument
for number, *arguments in CALLS:
    values = [ctypes.c_ulong(value(argument)) for argument in arguments]
    libc.syscall(ctypes.c_long(number), *values)
"""


def random_call(rng: random.Random, listed: list[int], pid: int, folder: Path) -> list:
    """Return a number and six arguments; text stands for what only the program knows."""
    path = bytes(folder / "file") + b"\0"
    pool = [0, 1, 2, 3, 4, 5, 63, -1, -100, 0x2000, 0x40, 0x42, 0x241, 0x410002, 1 << 20, 1 << 40]
    pool += [pid, -pid, pid << 32 | pid, "own", "parent", 6, 9, 10, 15, 17, 19, 34, 1030, 1031]
    pool += [0x5401, 0x5421, 0x5452, 0x8901, 0x8902, 0x3D0F00, 0x10F00, 0x4111, 0x10000011]
    pool += [path, bytes(folder) + b"\0", b"..\0", b"new\0", b"program.py\0", bytes(64)]
    pool += [number.to_bytes(4, "little") * 16 for number in (1, 9, pid)]
    pool += [f"/proc/{pid}/{name}\0".encode() for name in ("mem", "oom_score_adj", "fd/1")]
    number = rng.choice(listed) if rng.random() < 0.7 else rng.randrange(470)
    arguments = [rng.choice(pool) if rng.random() < 0.9 else rng.getrandbits(64) for _ in range(6)]
    return [number, *arguments]


def fuzz(seed: int, programs: int, victim, scratch: Path) -> None:
    rng = random.Random(seed)
    numbers = (number_of(call, os.uname().machine) for call in CALLS)
    ending = {"exit", "exit_group", "rt_sigreturn", "munmap"}  # these only end the batch
    names = {number_of(call, os.uname().machine): call.name for call in CALLS}
    listed = [number for number in numbers if number is not None and names[number] not in ending]
    before = victim.state()
    for _ in range(programs):
        calls = [
            random_call(rng, listed, victim.pid, victim.folder) for _ in range(CALLS_PER_PROGRAM)
        ]
        started = time.monotonic()
        code = f"CALLS = {calls!r}\n{PROGRAM}"
        asyncio.run(run_python(code, "input", Limits(time_s=0.5, memory_mb=300)))
        assert time.monotonic() - started < 30, calls
        assert victim.state() == before, calls
        assert list(scratch.iterdir()) == [], calls


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_leave_others_alone(victim, scratch: Path, seed: int) -> None:
    children = psutil.Process().children(recursive=True)
    fuzz(seed, 8, victim, scratch)
    assert psutil.Process().children(recursive=True) == children


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_random_calls_leave_others_alone(victim, scratch: Path, seed: int) -> None:
    fuzz(seed, 50, victim, scratch)
