"""The inside of the sandbox: it gives up its rights, then runs `program.py`.

run.py starts it as an isolated interpreter in the program's folder. It uses the standard library
and system_calls.py only. Its steps, in order:
  1. the kernel kills it when its parent dies, and before others when memory is short;
  2. resource limits;
  3. no capabilities and no new privileges;
  4. Landlock (landlock(7)): read the interpreter's folders, write the working directory, nothing
     else; where the kernel can (Linux 6.12), no signals to processes outside;
  5. seccomp(2), a first filter: each new thread, file and folder needs a yes of run.py,
     which gets the filter's descriptor;
  6. seccomp, a second filter: only the calls of system_calls.py, so no sockets, no new processes,
     no signals to others, no change of limits or permissions;
  7. it writes one byte, READY, to standard output and runs the program.

A failure before step 7 is the sandbox's, never the program's.
"""

import builtins
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import traceback
import types
from contextlib import suppress

from areal_lite.rewards.sandbox.system_calls import MACHINES, allow_filter, notify_filter

READY = b"\x06"
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522

_SETUP_CALLS = {"x86_64": (126, 317), "aarch64": (91, 277)}  # machine -> capset, seccomp
_SECCOMP_SET_FILTER, _SECCOMP_NEW_LISTENER = 1, 8

# Landlock: system calls, access rights and scopes.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# Number of access rights for files that a version of Landlock knows, from version 3 on the maximum;
# ioctls of devices are left out.
_NUM_RIGHTS = {1: 13, 2: 14}
_MAX_NUM_RIGHTS = 15
_SCOPES_SINCE, _SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 6, 1 << 0, 1 << 1

# A dump goes to a program of the system even if its size is 0; 1 is the value that prevents it.
_NO_CORE_DUMP = 1

_libc = ctypes.CDLL(None, use_errno=True)


def main(argument: str) -> None:
    """Confine this process by the settings of run.py, in JSON, and run the program."""
    settings = json.loads(argument)
    try:
        confine(settings)
        with open("program.py", encoding="utf-8") as file:
            source = file.read()
    except (OSError, ValueError) as error:
        sys.exit(f"sandbox: {error}")
    sys.path += settings["packages"]
    sys.set_int_max_str_digits(0)  # the limit of processor time holds for long numbers, too
    builtins.exit = builtins.quit = sys.exit  # that which `site` defines, which is left out
    sys.argv = ["program.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = "program.py"
    os.write(1, READY)
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except Exception as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this file
        traceback.print_exception(error.with_traceback(trace))
        sys.stdout.flush()
        sys.exit(1)


def confine(settings: dict) -> None:
    """Give up all rights for good. Raises OSError or ValueError where the kernel cannot."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:
        raise ValueError("its parent is gone")
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in MACHINES:
        raise ValueError(
            f"there is no sandbox for {sys.platform} on {machine},"
            f" only for Linux on {', '.join(MACHINES)}"
        )
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    capset, seccomp = _SETUP_CALLS[machine]
    _limit(settings)
    _drop_privileges(capset)
    _restrict_files(settings["readable"])
    with socket.socket(fileno=settings["channel"]) as channel:
        listener = _restrict_calls(seccomp, notify_filter(machine), _SECCOMP_NEW_LISTENER)
        socket.send_fds(channel, [b"listener"], [listener])
        os.close(listener)
    # With this before, no descriptor could be sent while the user's processes send 64 others.
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    _restrict_calls(seccomp, allow_filter(machine, os.getpid()), 0)


def _limit(settings: dict) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["file_bytes"]),
        (resource.RLIMIT_CPU, settings["cpu_s"]),
        (resource.RLIMIT_CORE, _NO_CORE_DUMP),
        # The user's other processes share what these count.
        (resource.RLIMIT_SIGPENDING, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _drop_privileges(capset: int) -> None:
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    _check(_libc.syscall(capset, header, ctypes.create_string_buffer(24)), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _restrict_files(readable: list[str]) -> None:
    version = _check(
        _libc.syscall(_LANDLOCK_CREATE, None, 0, 1),
        "Landlock is not available (Linux 5.13 or later has it)",
    )
    handled = (1 << _NUM_RIGHTS.get(version, _MAX_NUM_RIGHTS)) - 1
    attributes = struct.pack("Q", handled)
    if version >= _SCOPES_SINCE:  # the second field has rights of sockets
        attributes += struct.pack("QQ", 0, _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
    ruleset = _check(
        _libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "Landlock ruleset"
    )
    rules = {path: _READ_FILE | _READ_DIR for path in readable}
    rules["/dev/null"] = _READ_FILE | _WRITE_FILE
    rules["."] = handled & ~_EXECUTE
    for path, rights in rules.items():
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = rights if os.path.isdir(path) else rights & ~_READ_DIR
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, fd), 12)
        _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"Landlock rule for {path}")
        os.close(fd)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "Landlock")
    os.close(ruleset)


def _restrict_calls(seccomp: int, program: bytes, flags: int) -> int:
    """Install a filter. Returns the descriptor of its notifications if `flags` ask for it."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    return _check(_libc.syscall(seccomp, _SECCOMP_SET_FILTER, flags, fprog), "seccomp")


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
