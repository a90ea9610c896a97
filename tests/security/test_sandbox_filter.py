"""The seccomp filters of both machines, run by an interpreter of classic BPF."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from areal_lite.rewards.sandbox.system_calls import (
    CALLS,
    CREATIONS,
    MACHINES,
    allow_filter,
    notify_filter,
    number_of,
)

PID = 4321
ALLOW, REFUSE, NOTIFY, KILL = 0x7FFF0000, 0x00050000 | 38, 0x7FC00000, 0x80000000
HIGH = 7 << 32  # what the kernel ignores in an argument of 32 bits
THREAD = 0x3D0F00
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
both = pytest.mark.parametrize("machine", MACHINES)


def run(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """Run a filter on one call and return its result (struct seccomp_data in seccomp(2))."""
    words = [argument & 0xFFFFFFFFFFFFFFFF for argument in (*arguments, 0, 0, 0, 0, 0, 0)][:6]
    data = struct.pack("<iIQ6Q", number, MACHINES[machine], 0, *words)
    code = list(struct.iter_unpack("<HBBI", program))
    register = position = 0
    while True:
        operation, if_true, if_false, operand = code[position]
        position += 1
        if operation == 0x20:
            (register,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x15:
            position += if_true if register == operand else if_false
        elif operation == 0x54:
            register &= operand
        elif operation == 0x06:
            return operand
        else:
            raise AssertionError(f"unknown instruction {operation:#x}")


def verdict(machine: str, name: str, *arguments: int) -> int:
    number = next(number_of(call, machine) for call in CALLS if call.name == name)
    assert number is not None
    return run(allow_filter(machine, PID), machine, number, *arguments)


@both
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    pattern = r"#define __NR(?:3264)?_(\w+)\s+(\d+)"
    numbers = {k: int(v) for k, v in re.findall(pattern, HEADERS[machine].read_text())}
    numbers.setdefault("newfstatat", numbers.get("3264_fstatat", numbers.get("fstatat", -1)))
    for call in CALLS:
        number = numbers.get(call.name, numbers.get(f"3264_{call.name}"))
        assert number_of(call, machine) == number, call.name


@both
def test_only_listed_calls_pass(machine: str) -> None:
    program = allow_filter(machine, PID)
    listed = {number_of(call, machine) for call in CALLS}
    for number in (*range(1200), -1, *(0x40000000 | n for n in range(600))):
        if number not in listed:
            assert run(program, machine, number) == REFUSE, number
    for call in CALLS:
        number = number_of(call, machine)
        if number is not None and not call.rules:
            assert run(program, machine, number, *[-1] * 6) == ALLOW, call.name


@both
def test_calls_of_another_machine_kill(machine: str) -> None:
    foreign = {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]
    for program in (allow_filter(machine, PID), notify_filter(machine)):
        assert run(program, foreign, 0) == KILL


@both
@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        (
            "fcntl",
            [(0, 0), (0, 1), (0, 2, 1), (0, 3), (0, 4, 0x800), (0, 1030, 3)],
            # SETFL with O_ASYNC, SETOWN, SETSIG, SETOWN_EX, SETLEASE, NOTIFY, SETPIPE_SZ, locks.
            [(0, 4, 0x2000), (0, 4, 0x2800), (0, 8, 1), (0, 10, 9), (0, 15), (0, 1024), (0, 1026)]
            + [(0, 1031), (0, 5), (0, 6), (0, 7), (0, 36), (0, 37), (0, 38), (0, 1033), (0, -1)],
        ),
        (
            "ioctl",
            [(0, 0x5401), (0, 0x5413), (0, 0x5421), (0, 0x5450), (0, 0x5451)],
            # FIOASYNC, FIOSETOWN, SIOCSPGRP, TIOCSPGRP, TIOCSTI, TIOCSCTTY, SIOCGIFCONF, FIGETBSZ.
            [(0, command) for command in (0x5452, 0x8901, 0x8902, 0x5410, 0x5412, 0x540E, 0x8912)]
            + [(0, command) for command in (0, 2, 0x40085203, 0xC0502100, -1)],
        ),
        (
            "openat",
            [(0, 0, flags) for flags in (0, 1, 2, 0x201, 0x202, 0x241, 0x80242, 0x10000)],
            # O_ASYNC; access mode 3; O_TRUNC without a mode that writes.
            [(0, 0, flags) for flags in (0x2000, 0x2042, 3, 0x203, 0x243, 0x200, 0x240, 0x80200)],
        ),
        ("mmap", [(0, 9, 3, 0x22)], [(0, 9, 3, 0x40022), (0, 9, 3, 0x54040022)]),
        ("madvise", [(0, 9, 4), (0, 9, 14)], [(0, 9, 12), (0, 9, 21), (0, 9, 100), (0, 9, -1)]),
        (
            "futex",
            [(0, 128), (0, 129), (0, 0), (0, 0x189), (0, 4)],
            # LOCK_PI, TRYLOCK_PI, WAIT_REQUEUE_PI, LOCK_PI2, FD.
            [(0, 6), (0, 134), (0, 8), (0, 11 | 128), (0, 13), (0, 2), (0, -1)],
        ),
        (
            "clone",
            [(THREAD,)],
            # A process, and threads in a namespace, without shared descriptors, or traced.
            [(17,), (0,), (0x4111,), (THREAD | 0x10000000,), (THREAD & ~0x400,), (THREAD | 0x2000,)]
            + [(THREAD | HIGH,)],
        ),
        ("tgkill", [(PID, 5, 6)], [(PID + 1, 5, 6), (-1, 5, 6), (0, 5, 6), (1, PID, 9)]),
        ("prlimit64", [(0, 7, 0, 9)], [(0, 7, 9), (0, 7, HIGH), (1, 7, 0), (PID, 7, 0, 9)]),
        ("clock_gettime", [(0,), (3,), (11,)], [(-6,), (12,), (~PID << 3 | 2,)]),
        ("clock_nanosleep", [(1,)], [(~PID << 3 | 2,)]),
    ],
)
def test_arguments(machine: str, name: str, allowed: list, refused: list) -> None:
    for arguments in allowed:
        assert verdict(machine, name, *arguments) == ALLOW, arguments
    for arguments in refused:
        assert verdict(machine, name, *arguments) == REFUSE, arguments
        if name != "prlimit64":  # the upper half does not hide what the kernel sees
            hidden = [(argument & 0xFFFFFFFF) | HIGH for argument in arguments]
            assert verdict(machine, name, *hidden) == REFUSE, arguments


@both
def test_every_creation_is_asked_about(machine: str) -> None:
    program = notify_filter(machine)
    for call in CALLS:
        number = number_of(call, machine)
        if number is None:
            continue
        assert run(program, machine, number) == (
            NOTIFY if call.name in CREATIONS and call.name != "openat" else ALLOW
        ), call.name
        if call.name == "openat":
            for flags in (0x40, 0x241, 0x410000, 0x400000, 0x400000 | HIGH):
                assert run(program, machine, number, 0, 0, flags) == NOTIFY
            for flags in (0, 1, 0x80000, 0x10000, 0x4000):
                assert run(program, machine, number, 0, 0, flags) == ALLOW
