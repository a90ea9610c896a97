"""The worse world of the chaos runs, around a program of a few lines."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from tests.chaos.world import World
from tests.proxy import RESET_AT_CLOSE, Proxy

ROLES = ["areal_lite.controller.service", "areal_lite.trainer.loop"]
SUPERVISOR = ["areal_lite", "train"]

PROGRAM = """
import os, socket, sqlite3, sys, threading, time
from pathlib import Path

folder = Path(sys.argv[1])

def wait(seconds):
    condition = threading.Condition()
    with condition:
        started = time.monotonic()
        condition.wait(seconds)
    return time.monotonic() - started

for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    (tmp_path / "run").mkdir()
    made = World(tmp_path / "run", tmp_path)
    yield made
    made.close()


@pytest.fixture
def ask(world: World, tmp_path) -> Iterator[Callable[..., str]]:
    """ask(expression, command line) -> what a program with that command line says to it."""
    programs: dict[tuple[str, ...], subprocess.Popen] = {}

    def say(expression: str, *command: str) -> str:
        if command not in programs:
            argv = [sys.executable, "-c", PROGRAM, tmp_path / "run", *command]
            programs[command] = subprocess.Popen(
                argv,
                env=os.environ | world.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        program = programs[command]
        program.stdin.write(expression + "\n")
        program.stdin.flush()
        return program.stdout.readline().strip()

    yield say
    for program in programs.values():
        program.kill()
        program.wait()


@pytest.mark.parametrize("command", [[ROLES[0]], [ROLES[1]], SUPERVISOR])
def test_a_failing_disk_refuses_files_below_the_folder_and_no_others(world, ask, command) -> None:
    inside, outside = "(folder/'f').write_text('x')", "(folder.parent/'f').write_text('x')"
    insert = "sqlite3.connect(folder/'db').execute('create table t(a)')"
    assert ask(inside, *command) == "1"
    world.fail_writes(errno.ENOSPC)
    assert ask(inside, *command).startswith("OSError [Errno 28] No space left on device")
    assert ask(insert, *command) == "OperationalError database or disk is full"
    assert ask(outside, *command) == ask(inside, "another program") == "1"
    world.fail_writes(errno.EROFS)
    assert ask(inside, *command).startswith("OSError [Errno 30] Read-only file system")
    assert ask("len((folder/'f').read_text())", *command) == ask(outside, *command) == "1"
    world.fail_writes(0)
    assert ask(inside, *command) == "1"


def test_the_wall_clock_jumps_and_waits_stay_as_long(world, ask) -> None:
    for seconds in (7200, -7200, -3600):
        world.jump(seconds)
    for command, offset in ((ROLES[0], -3600), ("another program", 0)):
        assert abs(float(ask("time.time()", command)) - time.time() - offset) < 5
        assert 0.2 <= float(ask("wait(0.2)", command)) < 2


def test_connections_of_roles_are_cut_and_slow(world, ask) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]

        def echo(connection: socket.socket) -> None:
            with suppress(OSError):
                connection.sendall(connection.recv(9))

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=echo, args=[connection], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        connect = f"globals().update(c=socket.create_connection(('127.0.0.1', {port}))) or 0"
        trip = "(time.monotonic(), c.sendall(b'x'), c.recv(1), time.monotonic())"
        for command in (ROLES[0], "another program"):
            assert ask(connect, command) == "0"
            assert ask("c.getpeername()[0].startswith('127.100.')", command) == str(
                command == ROLES[0]
            )
        world.cut()
        assert ask(trip, ROLES[0]).startswith("ConnectionResetError")
        assert "b'x'" in ask(trip, "another program")
        ask(connect, ROLES[0])
        world.slow(True)
        began, _, _, ended = eval(ask(trip, ROLES[0]))
        assert ended - began >= 0.2


def test_a_reset_passes_through_the_proxy() -> None:
    """A process that is killed with unread data resets its connections."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        with closing(Proxy(lambda _: server.getsockname())) as proxy:
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
                accepted, _ = server.accept()
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
                accepted.close()
                assert client.recv(1) == b""
