"""The system calls of a sandboxed program, and the seccomp(2) filters that enforce them.

A call that is missing here fails with ENOSYS, as on an older kernel. The list has what Python
programs were seen to need, and calls that differ only in the version of the C library. Each line
says what needs the call. A call acts on the program itself, on its own descriptors, or on files
that Landlock checks. Where a call can do more, its arguments are checked.

Arguments are 64 bits here. The kernel takes most as 32 bits and ignores the rest. Rules compare the
low half, so nothing in the high half can turn a refused value into an allowed one.
"""

import struct
from collections import namedtuple

# Commands and flags of the kernel's interface, equal on both machines.
_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_SETFL, _F_DUPFD_CLOEXEC = 0, 1, 2, 3, 4, 1030
_TCGETS, _TIOCGWINSZ, _FIONBIO, _FIONCLEX, _FIOCLEX = 0x5401, 0x5413, 0x5421, 0x5450, 0x5451
_O_RDONLY, _O_WRONLY, _O_RDWR, _O_ACCMODE = 0, 1, 2, 3
_O_CREAT, _O_TRUNC, _O_ASYNC, _O_TMPFILE = 0x40, 0x200, 0x2000, 0x400000
_MAP_HUGETLB = 0x40000
# MADV_NORMAL to MADV_DONTNEED, MADV_FREE, MADV_HUGEPAGE, MADV_NOHUGEPAGE.
_ADVICE = (0, 1, 2, 3, 4, 8, 14, 15)
# Wait, wake and requeue, of either kind; without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME.
_FUTEX_OPERATIONS, _FUTEX_FLAGS = (0, 1, 3, 4, 5, 9, 10), 0x180
# The flags of pthread_create: everything is shared, and no namespace is new.
_THREAD_FLAGS = 0x3D0F00
_NUM_CLOCKS = 12  # a larger number is the clock of another process


# Each program starts by importing this module, and typing is slow to import.
Check = namedtuple("Check", ("argument", "values", "mask", "high"), defaults=(0xFFFFFFFF, False))
Check.__doc__ = """A condition on the low half of an argument: with `mask`, it is one of `values`.

If `high`, the high half must be zero too.
"""
Call = namedtuple("Call", ("name", "x86_64", "aarch64", "need", "rules"), defaults=((),))
Call.__doc__ = """A system call and its numbers; None where a machine lacks it.

`rules` are alternatives, and all checks of one must hold. `OWN_PID` in a check stands for the
number of the process.
"""

OWN_PID = -1

CALLS = (
    # Descriptors that the program has.
    Call("read", 0, 63, "files and standard input"),
    Call("write", 1, 64, "files and standard output"),
    Call("readv", 19, 65, "os.readv"),
    Call("writev", 20, 66, "messages of the C library"),
    Call("pread64", 17, 67, "loading of shared libraries"),
    Call("pwrite64", 18, 68, "os.pwrite"),
    Call("close", 3, 57, "files"),
    Call("lseek", 8, 62, "files"),
    Call("fstat", 5, 80, "files"),
    Call("getdents64", 217, 61, "listing of folders"),
    Call("ftruncate", 77, 46, "file.truncate; RLIMIT_FSIZE bounds it"),
    Call("fsync", 74, 82, "os.fsync"),
    Call("dup", 32, 23, "os.dup of older versions"),
    Call("dup2", 33, None, "os.dup2"),
    Call("dup3", 292, 24, "os.dup2"),
    Call("poll", 7, None, "select.poll"),
    Call("ppoll", 271, 73, "select.poll"),
    Call("select", 23, None, "select.select of older C libraries"),
    Call("pselect6", 270, 72, "select.select"),
    # F_SETOWN, F_SETSIG and O_ASYNC signal any process of the user. F_SETLEASE, F_NOTIFY and locks
    # touch users of a file. F_SETPIPE_SZ takes a pipe's memory from the user's share.
    Call(
        "fcntl", 72, 25, "os.dup, inheritance and blocking mode of descriptors",
        (
            (Check(1, (_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC)),),
            (Check(1, (_F_SETFL,)), Check(2, (0,), mask=_O_ASYNC)),
        ),
    ),
    # FIOASYNC, FIOSETOWN and SIOCSPGRP signal too. TIOCSTI types on a terminal.
    Call(
        "ioctl", 16, 29, "isatty, size of the terminal, inheritance and blocking mode",
        ((Check(1, (_TCGETS, _TIOCGWINSZ, _FIONBIO, _FIONCLEX, _FIOCLEX)),),),
    ),
    # Files. Landlock checks reading and writing; names, sizes and targets of links are open. For
    # access mode 3 it asks for no right, and before Linux 6.2 for none for O_TRUNC, with which a
    # program could empty any file of the user. So O_TRUNC needs a mode that writes, which Landlock
    # always checks.
    Call(
        "openat", 257, 56, "files; see CREATIONS",
        ((Check(
            2,
            (_O_RDONLY, _O_WRONLY, _O_RDWR, _O_WRONLY | _O_TRUNC, _O_RDWR | _O_TRUNC),
            mask=_O_ACCMODE | _O_TRUNC | _O_ASYNC,
        ),),),
    ),
    Call("newfstatat", 262, 79, "os.stat"),
    Call("statx", 332, 291, "os.stat"),
    Call("stat", 4, None, "os.stat of older C libraries"),
    Call("lstat", 6, None, "os.lstat of older C libraries"),
    Call("access", 21, None, "os.access"),
    Call("faccessat", 269, 48, "os.access"),
    Call("readlink", 89, None, "os.path.realpath"),
    Call("readlinkat", 267, 78, "os.path.realpath"),
    Call("getcwd", 79, 17, "os.getcwd"),
    Call("chdir", 80, 49, "os.chdir"),
    Call("umask", 95, 166, "os.umask, which expects no failure"),
    Call("mkdir", 83, None, "os.mkdir; see CREATIONS"),
    Call("mkdirat", 258, 34, "os.mkdir; see CREATIONS"),
    Call("rmdir", 84, None, "os.rmdir"),
    Call("unlink", 87, None, "os.unlink, temporary files"),
    Call("unlinkat", 263, 35, "shutil.rmtree"),
    Call("rename", 82, None, "os.rename"),
    Call("renameat", 264, 38, "os.rename"),
    # Memory of the program. RLIMIT_AS bounds it.
    Call("brk", 12, 214, "memory"),
    Call(  # MAP_HUGETLB takes from the machine's pool of huge pages
        "mmap", 9, 222, "memory and shared libraries",
        ((Check(3, (0,), mask=_MAP_HUGETLB),),),
    ),
    Call("munmap", 11, 215, "memory"),
    Call("mremap", 25, 216, "realloc"),
    Call("mprotect", 10, 226, "shared libraries and the stacks of threads"),
    Call("msync", 26, 227, "mmap.flush"),
    Call(  # MADV_MERGEABLE shares pages with other processes, MADV_PAGEOUT evicts shared ones
        "madvise", 28, 233, "memory of ended threads, numpy",
        ((Check(2, _ADVICE),),),
    ),
    # Threads. CREATIONS bounds their number.
    Call(
        "clone", 56, 220, "threads, but no processes",
        ((Check(0, (_THREAD_FLAGS,), high=True),),),
    ),
    Call(  # the operations with priority inheritance raise the priority of any thread
        "futex", 202, 98, "locks",
        ((Check(1, _FUTEX_OPERATIONS, mask=0xFFFFFFFF & ~_FUTEX_FLAGS),),),
    ),
    Call("set_robust_list", 273, 99, "start of a thread"),
    Call("rseq", 334, 293, "start of a thread"),
    Call("sched_yield", 24, 124, "time.sleep(0) of older versions, numpy"),
    Call("sched_getaffinity", 204, 123, "number of processors; reads only"),
    Call("exit", 60, 93, "end of a thread"),
    Call("exit_group", 231, 94, "end of the program"),
    # Signals to the program itself.
    Call("rt_sigaction", 13, 134, "signal.signal"),
    Call("rt_sigprocmask", 14, 135, "start of a thread"),
    Call("rt_sigreturn", 15, 139, "end of a signal handler"),
    Call("sigaltstack", 131, 132, "faulthandler"),
    Call("restart_syscall", 219, 128, "the kernel itself after a stop"),
    Call("tgkill", 234, 131, "abort, to own threads only", ((Check(0, (OWN_PID,)),),)),
    Call("alarm", 37, None, "signal.alarm"),
    Call("setitimer", 38, 103, "signal.setitimer, signal.alarm"),
    Call("getitimer", 36, 102, "signal.getitimer"),
    # Time. Clocks of other processes have larger numbers.
    Call("clock_gettime", 228, 113, "time", ((Check(0, tuple(range(_NUM_CLOCKS))),),)),
    Call("clock_getres", 229, 114, "time", ((Check(0, tuple(range(_NUM_CLOCKS))),),)),
    Call("clock_nanosleep", 230, 115, "time.sleep", ((Check(0, tuple(range(_NUM_CLOCKS))),),)),
    Call("nanosleep", 35, 101, "time.sleep of older versions"),
    Call("gettimeofday", 96, 169, "time where the kernel maps no clock"),
    Call("time", 201, None, "time where the kernel maps no clock"),
    # Facts that the program may read about itself and the machine.
    Call("getpid", 39, 172, "os.getpid, tempfile"),
    Call("getppid", 110, 173, "os.getppid, which expects no failure"),
    Call("gettid", 186, 178, "threading"),
    Call("getuid", 102, 174, "os.path.expanduser"),
    Call("geteuid", 107, 175, "os.geteuid"),
    Call("getgid", 104, 176, "os.getgid"),
    Call("getegid", 108, 177, "os.getegid"),
    Call("uname", 63, 160, "platform"),
    Call("sysinfo", 99, 179, "qsort of the C library"),
    Call("times", 100, 153, "os.times"),
    Call("getrusage", 98, 165, "resource.getrusage"),
    Call("getrandom", 318, 278, "random, secrets"),
    Call(  # its own limits, and no new ones
        "prlimit64", 302, 261, "resource.getrlimit",
        ((Check(0, (0,)), Check(2, (0,), high=True)),),
    ),
)  # fmt: skip

# Calls that make something that a resource limit does not count: a thread, a file or a folder.
# confine.py lets the supervisor decide each one.
CREATIONS = {
    "clone": (),
    "openat": (
        (Check(2, (_O_CREAT,), mask=_O_CREAT),),
        (Check(2, (_O_TMPFILE,), mask=_O_TMPFILE),),
    ),
    "mkdir": (),
    "mkdirat": (),
}

# machine -> AUDIT_ARCH, the first field that a filter compares.
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Classic BPF: load a word, jump if equal, and with a constant, return.
_LOAD, _JUMP_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _NO_SUCH_CALL, _KILL, _NOTIFY = 0x7FFF0000, 0x00050000 | 38, 0x80000000, 0x7FC00000
# Offsets in struct seccomp_data. Both machines are little-endian.
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, operand


def number_of(call: Call, machine: str) -> int | None:
    """Return the number of a call on a machine."""
    return call.x86_64 if machine == "x86_64" else call.aarch64


def allow_filter(machine: str, pid: int) -> bytes:
    """Assemble the filter that refuses every call but `CALLS`, for the process `pid`."""
    code = _begin(machine)
    for call in CALLS:
        code += _branch(number_of(call, machine), call.rules, pid, _ALLOW, _NO_SUCH_CALL)
    return _assemble([*code, (_RETURN, 0, 0, _NO_SUCH_CALL)])


def notify_filter(machine: str) -> bytes:
    """Assemble the filter that asks the supervisor about `CREATIONS`."""
    code = _begin(machine)
    for call in CALLS:
        if call.name in CREATIONS:
            code += _branch(number_of(call, machine), CREATIONS[call.name], 0, _NOTIFY, _ALLOW)
    return _assemble([*code, (_RETURN, 0, 0, _ALLOW)])


def _begin(machine: str) -> list[_Instruction]:
    """Kill programs that use another machine's calls, and load the number of the call."""
    return [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, MACHINES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _branch(
    number: int | None, rules: tuple[tuple[Check, ...], ...], pid: int, met: int, unmet: int
) -> list[_Instruction]:
    """Return `met` for call `number` if one of `rules` holds or there is none, else `unmet`."""
    if number is None:
        return []
    body: list[_Instruction] = []
    for rule in rules:
        checks: list[_Instruction] = []
        for check in reversed(rule):  # jumps go forward, over what is already assembled
            checks = _check(check, pid, 1 + len(checks)) + checks
        body += [*checks, (_RETURN, 0, 0, met)]
    body.append((_RETURN, 0, 0, unmet if rules else met))
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _check(check: Check, pid: int, to_fail: int) -> list[_Instruction]:
    """Go on behind the check if it holds, else jump `to_fail` instructions further."""
    offset = _ARGUMENTS + 8 * check.argument
    values = [pid if value == OWN_PID else value for value in check.values]
    code: list[_Instruction] = []
    if check.high:
        code = [(_LOAD, 0, 0, offset + 4), (_JUMP_EQUAL, 0, 2 + len(values) + to_fail, 0)]
    code += [(_LOAD, 0, 0, offset), (_AND, 0, 0, check.mask)]
    for left in range(len(values) - 1, -1, -1):
        code.append((_JUMP_EQUAL, left, 0 if left else to_fail, values[len(values) - 1 - left]))
    return code


def _assemble(code: list[_Instruction]) -> bytes:
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
