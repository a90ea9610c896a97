"""The inside of the sandbox: a script that gives up its rights, then runs `program.py`.

run.py starts it as `python -I -S confine.py SETTINGS` in the program's folder. It uses the standard
library only. Its steps, in order:
  1. the kernel kills it when its parent dies;
  2. resource limits;
  3. no capabilities and no new privileges;
  4. Landlock (landlock(7)): read the interpreter's folders, write the working directory, nothing
     else;
  5. seccomp(2): only the system calls below, so no sockets, no new processes, no signals to others,
     no change of limits or permissions;
  6. it writes one byte, READY, to standard output and runs the program.

A failure before step 6 is the sandbox's, never the program's.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import traceback
import types

READY = b"\x06"
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_CAPABILITY_VERSION_3 = 0x20080522

# Landlock: system calls and access rights.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# Number of access rights for files that a version of Landlock knows, from version 3 on the maximum;
# ioctls of devices are left out.
_NUM_RIGHTS = {1: 13, 2: 14}
_MAX_NUM_RIGHTS = 15

# name:number on x86_64:number on aarch64. Other calls fail with ENOSYS, as on an older kernel.
_SYSTEM_CALLS = """
read:0:63 write:1:64 openat:257:56 close:3:57 newfstatat:262:79 fstat:5:80 lseek:8:62 mmap:9:222
munmap:11:215 mprotect:10:226 brk:12:214 futex:202:98 rt_sigaction:13:134 rt_sigprocmask:14:135
rt_sigreturn:15:139 ioctl:16:29 fcntl:72:25 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66
getdents64:217:61 statx:332:291 access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:-
readlinkat:267:78 open:2:- stat:4:- lstat:6:- pipe:22:- pipe2:293:59 dup:32:23 dup2:33:- dup3:292:24
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232:- epoll_pwait:281:22 eventfd2:290:19 mremap:25:216 msync:26:227 madvise:28:233
mincore:27:232 sched_yield:24:124 sched_getaffinity:204:123 nanosleep:35:101 clock_nanosleep:230:115
clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:- times:100:153 alarm:37:-
getitimer:36:102 setitimer:38:103 rt_sigtimedwait:128:137 rt_sigpending:127:136
rt_sigsuspend:130:133 sigaltstack:131:132 restart_syscall:219:128 getpid:39:172 getppid:110:173
gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158
getresuid:118:148 getresgid:120:150 getpgid:121:155 getpgrp:111:- getsid:124:156 uname:63:160
sysinfo:99:179 getrlimit:97:163 getrusage:98:165 getrandom:318:278 umask:95:166 getcwd:79:17
chdir:80:49 fchdir:81:50 mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35
rename:82:- renameat:264:38 renameat2:316:276 fsync:74:82 fdatasync:75:83 ftruncate:77:46
fadvise64:221:223 copy_file_range:326:285 sendfile:40:71 statfs:137:43 fstatfs:138:44
set_tid_address:218:96 set_robust_list:273:99 get_robust_list:274:100 rseq:334:293
membarrier:324:283 arch_prctl:158:- exit:60:93 exit_group:231:94 wait4:61:260
"""
# machine -> (column in the table, AUDIT_ARCH, clone, tgkill, prlimit64, capset)
_MACHINES = {
    "x86_64": (1, 0xC000003E, 56, 234, 302, 126),
    "aarch64": (2, 0xC00000B7, 220, 131, 261, 91),
}
_CLONE_THREAD = 0x10000

# Classic BPF instructions (load, jump if equal, jump if bits are set, return) and seccomp results.
_LD, _JEQ, _JSET, _RET = 0x20, 0x15, 0x45, 0x06
_ALLOW, _NO_SUCH_CALL, _KILL = 0x7FFF0000, 0x00050000 | 38, 0x80000000
# Offsets in struct seccomp_data; arguments are 64 bits, of which the low half comes first.
_NUMBER, _ARCH, _ARG0, _ARG2, _ARG2_HIGH = 0, 4, 16, 32, 36

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    try:
        confine(settings)
        with open("program.py", encoding="utf-8") as file:
            source = file.read()
    except (OSError, ValueError) as error:
        sys.exit(f"sandbox: {error}")
    sys.path += settings["packages"]
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
    if sys.platform != "linux" or machine not in _MACHINES:
        raise ValueError(
            f"there is no sandbox for {sys.platform} on {machine},"
            f" only for Linux on {', '.join(_MACHINES)}"
        )
    column, arch, clone, tgkill, prlimit, capset = _MACHINES[machine]
    _limit(settings)
    _drop_privileges(capset)
    _restrict_files(settings["readable"])
    _restrict_calls(_filter(column, arch, clone, tgkill, prlimit))


def _limit(settings: dict) -> None:
    for limit, value in (
        (resource.RLIMIT_AS, settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["file_bytes"]),
        (resource.RLIMIT_CPU, settings["cpu_s"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
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
    attributes = ctypes.create_string_buffer(struct.pack("Q", handled), 8)
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, 8, 0), "Landlock ruleset")
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


def _filter(column: int, arch: int, clone: int, tgkill: int, prlimit: int) -> bytes:
    """Assemble the seccomp program, a list of (operation, jump if true, jump if false, operand)."""
    refuse, allow = (_RET, 0, 0, _NO_SUCH_CALL), (_RET, 0, 0, _ALLOW)
    code = [(_LD, 0, 0, _ARCH), (_JEQ, 1, 0, arch), (_RET, 0, 0, _KILL), (_LD, 0, 0, _NUMBER)]
    for call in _SYSTEM_CALLS.split():
        number = call.split(":")[column]
        if number != "-":
            code += [(_JEQ, 0, 1, int(number)), allow]
    # clone: threads, but no processes.
    code += [(_JEQ, 0, 4, clone), (_LD, 0, 0, _ARG0), (_JSET, 0, 1, _CLONE_THREAD), allow, refuse]
    # tgkill: abort(), but no signals to others.
    code += [(_JEQ, 0, 4, tgkill), (_LD, 0, 0, _ARG0), (_JEQ, 0, 1, os.getpid()), allow, refuse]
    # prlimit64: read limits (the new limit is a null pointer), but do not set them.
    code += [(_JEQ, 0, 6, prlimit), (_LD, 0, 0, _ARG2), (_JEQ, 0, 3, 0)]
    code += [(_LD, 0, 0, _ARG2_HIGH), (_JEQ, 0, 1, 0), allow, refuse]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*code, refuse])


def _restrict_calls(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    address = ctypes.addressof(buffer)
    fprog = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, address))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, fprog, 0, 0), "seccomp")


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    main()
