"""Programs that attack other processes, the disk or the machine from inside the sandbox."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from areal_lite.rewards.program import program_reward
from areal_lite.rewards.sandbox.run import Limits, Outcome, run_python
from areal_lite.system.files import remove_folder

ROOT = Path(__file__).parents[2]
# Helpers of every program below. `attempt` prints what came of a system call or function.
HELPERS = """
import ctypes, fcntl, os, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return error
def triggers():
    "Pairs of a descriptor and what makes it ready: standard input and output, a pipe."
    yield 0, lambda: os.read(0, 1)
    yield 1, lambda: os.write(1, b".")
    pair = attempt(os.pipe)
    if isinstance(pair, tuple):
        yield pair[0], lambda: os.write(pair[1], b"x")
"""
SIGNALS = {
    "F_SETOWN": "fcntl.fcntl(fd, 8, PID), fcntl.fcntl(fd, 4, 0o20000)",
    "F_SETOWN of a group": "fcntl.fcntl(fd, 8, -PID), fcntl.fcntl(fd, 4, 0o20000)",
    "F_SETOWN_EX": "fcntl.fcntl(fd, 15, struct.pack('ii', 1, PID)), fcntl.fcntl(fd, 4, 0o20000)",
    "FIOASYNC": "fcntl.fcntl(fd, 8, PID), fcntl.ioctl(fd, 0x5452, struct.pack('i', 1))",
    "SIOCSPGRP": "fcntl.ioctl(fd, 0x8902, struct.pack('i', PID)), fcntl.fcntl(fd, 4, 0o20000)",
    "FIOSETOWN": "fcntl.ioctl(fd, 0x8901, struct.pack('i', PID)), fcntl.fcntl(fd, 4, 0o20000)",
}


def sandboxed(code: str, stdin: str = "", **limits) -> Outcome:
    return asyncio.run(run_python(HELPERS + code, stdin, Limits(**limits)))


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch):
    """A folder for scratch folders, which must be empty in the end."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", SIGNALS)
def test_owners_of_descriptors_are_not_signalled(victim, name: str) -> None:
    before = victim.state()
    outcome = sandboxed(
        f"PID = {victim.pid}\n"
        "for fd, trigger in triggers():\n"
        "    attempt(lambda: fcntl.fcntl(fd, 10, 9))\n"
        f"    attempt(lambda: ({SIGNALS[name]}))\n"
        "    attempt(trigger)\n"
        "print('done')",
        stdin="text",
    )
    assert outcome.ok and outcome.stdout.endswith("done\n"), outcome
    time.sleep(0.05)
    assert victim.state() == before


def test_every_command_of_descriptors_leaves_others_alone(victim) -> None:
    """All commands of fcntl and the ioctls of descriptors, terminals and sockets."""
    before = victim.state()
    outcome = sandboxed(
        f"PID = {victim.pid}\n"
        "commands = [*range(64), *range(1024, 1060)]\n"
        "requests = [*range(0x5400, 0x5470), *range(0x8900, 0x8990)]\n"
        "files = [0, 1, os.open('program.py', os.O_RDONLY), os.open('x', os.O_RDWR | os.O_CREAT)]\n"
        "worked = set()\n"
        "for fd in files:\n"
        "    for value in (PID, -PID, struct.pack('ii', 1, PID)):\n"
        "        pointer = value if isinstance(value, int) else ctypes.c_char_p(value)\n"
        "        for command in commands:\n"
        "            if libc.fcntl(fd, command, pointer) != -1: worked.add(command)\n"
        "        for request in requests:\n"
        "            data = ctypes.create_string_buffer(struct.pack('i', PID), 64)\n"
        "            if libc.ioctl(fd, request, data) != -1: worked.add(request)\n"
        "        libc.fcntl(fd, 4, 0o20000)\n"
        "os.write(1, repr(sorted(worked)).encode())",
        stdin="text",
    )
    assert outcome.ok, outcome
    time.sleep(0.05)
    assert victim.state() == before
    # Duplicates, flags, and FIONCLEX, FIOCLEX, FIONBIO.
    assert set(eval(outcome.stdout)) <= {0, 1, 2, 3, 4, 1030, 0x5421, 0x5450, 0x5451}


def test_landlock_stops_signals_by_itself(victim) -> None:
    """The second wall, for a call that a later kernel may add: no seccomp filter here."""
    code = (
        "import os, sys, signal\nfrom areal_lite.rewards.sandbox import confine\n"
        "if confine._libc.syscall(confine._LANDLOCK_CREATE, None, 0, 1) < confine._SCOPES_SINCE:\n"
        "    sys.exit(77)\n"
        "confine._libc.prctl(confine._PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)\n"
        "confine._restrict_files([])\n"
        "os.kill(os.getpid(), 0)\n"
        f"os.kill({victim.pid}, signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 77:
        pytest.skip("Landlock has no scope of signals here (Linux 6.12 or later has it)")
    assert "PermissionError" in result.stderr
    assert victim.process.poll() is None


@pytest.mark.parametrize("num_rights", [13, 14, 15])
def test_files_outside_cannot_be_emptied(tmp_path: Path, num_rights: int) -> None:
    """Landlock of Linux 5.13 to 6.1 has 13 or 14 rights, and truncation is none of them."""
    files = {"outside": tmp_path / "outside", "readable": tmp_path / "readable" / "file"}
    files["readable"].parent.mkdir()
    for file in files.values():
        file.write_text("precious")
    (tmp_path / "work").mkdir()
    code = (
        "import os\nfrom areal_lite.rewards.sandbox import confine, system_calls\n"
        f"confine._NUM_RIGHTS, confine._MAX_NUM_RIGHTS = {{}}, {num_rights}\n"
        "confine._libc.prctl(confine._PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)\n"
        f"os.chdir({str(tmp_path / 'work')!r})\n"
        f"confine._restrict_files([{str(files['readable'].parent)!r}])\n"
        "program = system_calls.allow_filter(os.uname().machine, os.getpid())\n"
        "confine._restrict_calls(confine._SETUP_CALLS[os.uname().machine][1], program, 0)\n"
        "opened = []\n"
        f"for path in {[str(file) for file in files.values()]}:\n"
        "    for mode in range(4):\n"
        "        for flags in (0, os.O_TRUNC, os.O_CREAT | os.O_TRUNC):\n"
        "            try:\n"
        "                os.open(path, mode | flags)\n"
        "                opened.append((os.path.basename(path), mode, flags))\n"
        "            except OSError:\n"
        "                pass\n"
        "print(opened, file=open('own', 'w'))\n"
        "open('own', 'r+').write(''); os.open('own', os.O_RDWR)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert [file.read_text() for file in files.values()] == ["precious"] * 2
    assert (tmp_path / "work" / "own").read_text() == "[('file', 0, 0)]\n"


def test_the_number_of_threads_is_bounded() -> None:
    outcome = sandboxed(
        "threading.stack_size(32768)\nevent = threading.Event()\ncount = 0\n"
        "def more():\n    threading.Thread(target=more).start()\n    event.wait()\n"
        "try:\n"
        "    while count < 1000:\n"
        "        threading.Thread(target=event.wait).start()\n        count += 1\n"
        "except RuntimeError as error:\n    print(count, error)\nevent.set()",
        threads=20,
    )
    assert outcome.stdout == "19 can't start new thread\n", outcome


def test_threads_that_end_make_room() -> None:
    code = (
        "for _ in range(100):\n"
        "    threads = [threading.Thread(target=time.time) for _ in range(3)]\n"
        "    for thread in threads: thread.start()\n"
        "    for thread in threads: thread.join()\n"
        "print('done')"
    )
    assert sandboxed(code, threads=10).stdout == "done\n"


def test_a_program_that_asks_too_often_is_killed() -> None:
    """Each question takes time from the event loop that answers it."""
    code = (
        "number = 0\nwhile number < 100_000:\n    attempt(os.mkdir, f'{number}')\n    number += 1\n"
    )
    assert sandboxed(code, time_s=20).status == -9


CREATIONS = {
    "files": "os.close(os.open(f'f{number}', os.O_CREAT | os.O_WRONLY))",
    "removed files": "open('f', 'w').close(), os.unlink('f')",
    "hidden files": "os.close(os.open('.', os.O_TMPFILE | os.O_RDWR))",
    "files that only memory keeps": (
        "f = open('f', 'w+b'); f.write(bytes(4096)); f.flush(); "
        "kept = globals().setdefault('kept', []); "
        "kept.append(__import__('mmap').mmap(f.fileno(), 4096)); f.close(); os.unlink('f')"
    ),
    "folders": "os.mkdir(f'd{number}')",
    "folders by descriptor": "os.mkdir(f'd{number}', dir_fd=here)",
    "a deep folder": "os.mkdir('d'), os.chdir('d')",
}


@pytest.mark.parametrize("name", CREATIONS)
def test_what_a_program_creates_is_bounded(name: str) -> None:
    code = (
        "here = os.open('.', os.O_RDONLY)\n"
        f"for number in range(1000):\n    try: {CREATIONS[name]}\n"
        "    except OSError as error:\n        print(number, error.strerror)\n        break\n"
    )
    assert sandboxed(code, files=30).stdout == "30 Disk quota exceeded\n"


def test_a_program_that_fills_the_disk_fails(scratch: Path) -> None:
    """The total is the number of files times the size of each. Nothing of it stays."""
    fill = "number = 0\nwhile True:\n    open(f'{number}', 'wb').write(bytes(1 << 20))\n"
    fill += "    number += 1\n"
    outcome = sandboxed(fill, files=10, file_mb=1)
    assert outcome.status == 1 and "Disk quota exceeded" in outcome.stderr
    assert asyncio.run(program_reward(f"{HELPERS}{fill}", "assert True")) == 0.0


def test_a_program_with_a_deep_folder_is_scored(scratch: Path) -> None:
    program = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\n"
    assert asyncio.run(program_reward(program, "assert True")) == 0.0
    assert asyncio.run(program_reward(program.replace("1500", "200"), "assert True")) == 1.0


def test_what_users_share_cannot_be_taken() -> None:
    """Huge pages, queued signals, core dumps (a program of the system takes them), locks."""
    outcome = sandboxed(
        "import resource as r, mmap, signal\n"
        "for limit in (r.RLIMIT_SIGPENDING, r.RLIMIT_MSGQUEUE, r.RLIMIT_MEMLOCK, r.RLIMIT_CORE):\n"
        "    print(r.getrlimit(limit), end=' ')\n"
        "print(attempt(lambda: mmap.mmap(-1, 1 << 21, flags=0x40022)))\n"
        "fd = os.open(os.__file__, os.O_RDONLY)\n"
        "print(attempt(lambda: fcntl.flock(fd, fcntl.LOCK_SH)))\n"
        "print(attempt(lambda: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)))\n"
        "print(attempt(lambda: fcntl.fcntl(fd, 1024, 0)))\n"
        "print(libc.syscall(234 if os.uname().machine == 'x86_64' else 131,"
        " os.getpid(), threading.get_native_id(), 34))\n"
        "print(os.strerror(ctypes.get_errno()))"
    )
    refused = "[Errno 38] Function not implemented\n"
    assert outcome.stdout == (
        f"(0, 0) (0, 0) (0, 0) (1, 1) {refused}{refused}{refused}{refused}"
        "-1\nResource temporarily unavailable\n"
    ), outcome


def test_the_memory_of_a_program_is_bounded() -> None:
    """Each page of a mapping lies where it needs the most page tables."""
    code = (
        "import mmap\nlibc.mmap.restype = ctypes.c_void_p\n"
        "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + "
        "[ctypes.c_long]\n"
        "count = 0\n"
        "while count < 100_000:\n"
        "    place = 0x100000000 + (count << 30) % (1 << 46) + (count >> 16 << 21)\n"
        "    page = libc.mmap(place, 4096, 3, 0x100022, -1, 0)\n"
        "    if page == ctypes.c_void_p(-1).value: break\n"
        "    ctypes.memset(page, 1, 1)\n    count += 1\n"
        "print(count)"
    )
    outcome = sandboxed(code, memory_mb=200, time_s=20)
    assert outcome.ok and int(outcome.stdout) * 4096 < 200 << 20, outcome


@pytest.fixture
def memory_folder():
    """A folder in memory, where making and removing thousands of folders is fast."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as path:
        yield Path(path)


def test_folders_of_any_shape_are_removed(memory_folder: Path) -> None:
    """Deeper than the recursion limit, with longer paths than the kernel takes."""
    outside, folder = memory_folder / "outside", memory_folder / "folder"
    outside.mkdir()
    (outside / "file").write_text("kept")
    here = os.open(".", os.O_RDONLY)
    folder.mkdir()
    os.chdir(folder)
    try:
        for depth in range(1500):
            os.mkdir("d" * 200)
            Path(f"file{depth}").touch()
            os.chdir("d" * 200)
    finally:
        os.fchdir(here)
        os.close(here)
    os.mkdir(bytes(folder) + b"/\xff\n")
    (folder / "link").symlink_to(outside)
    (folder / "broken").symlink_to("nowhere")
    remove_folder(folder)
    assert not folder.exists()
    assert (outside / "file").read_text() == "kept"
    remove_folder(folder)  # it is no error that there is none


def test_locked_folders_are_removed(tmp_path: Path) -> None:
    """Modes do not stop root, so an ordinary user does it, where there is one to become."""
    code = (
        "import os, sys, tempfile\nfrom pathlib import Path\n"
        "from areal_lite.system.files import remove_folder\n"
        "folder = Path(tempfile.mkdtemp())\n"
        "inner = folder / 'locked' / 'inner'\n"
        "(inner / 'innermost').mkdir(parents=True)\n"
        "(inner / 'file').touch()\n"
        "inner.chmod(0)\ninner.parent.chmod(0)\nfolder.chmod(0)\n"
        "remove_folder(folder)\n"
        "assert not folder.exists()"
    )
    result = as_ordinary_user(code)
    assert result.returncode == 0, result.stderr


def test_the_sandbox_needs_no_root() -> None:
    code = (
        "import asyncio\nfrom areal_lite.rewards.sandbox.run import run_python\n"
        'code = \'import os; print(os.getuid()); open("f", "w"); open("/etc/passwd")\'\n'
        "outcome = asyncio.run(run_python(code))\n"
        "assert outcome.stdout != '0\\n' and 'PermissionError' in outcome.stderr, outcome\n"
    )
    result = as_ordinary_user(code)
    assert result.returncode == 0, result.stderr


def as_ordinary_user(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as nobody if we are root. Any interpreter that nobody can read will do."""
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-B", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{{}}"]
        user = {"user": "nobody", "group": "nogroup"} if os.getuid() == 0 else {}
        options = {"cwd": "/", "capture_output": True, "text": True, "env": {}, **user}
        check = "import areal_lite; assert sys.version_info >= (3, 11)"
        try:
            if subprocess.run([*command[:-1], command[-1].format(check)], **options).returncode:
                continue
        except OSError:
            continue
        return subprocess.run([*command[:-1], command[-1].format(code)], **options)
    pytest.skip("the user nobody can read no Python 3.11 or not this project")
