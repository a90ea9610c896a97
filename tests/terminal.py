"""A command on a terminal, whose screen a test can look at."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[1]


class Terminal:
    """A terminal of `columns` x `lines`, which runs one command. A context manager."""

    def __init__(self, command: list[str], columns: int = 80, lines: int = 24, **env: str):
        self.screen = pyte.HistoryScreen(columns, lines, history=100_000)
        self._stream = pyte.ByteStream(self.screen)
        self._unread = b""
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "", **env}
        for name in ("CI", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        environment |= env
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size."""
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)
        self.screen.resize(lines, columns)

    def press(self, keys: bytes) -> None:
        """Write as a user at the keyboard does; b"\\x03" is Ctrl-C."""
        os.write(self._master, keys)

    def read(self) -> bool:
        """Show what the command writes next; return False if it has ended.

        Each window title that it writes ends a part, so that a test can look at that moment.
        """
        while b"\x07" not in self._unread:
            ready = select.select([self._master], [], [], 0.05 if self._unread else 60.0)[0]
            try:
                chunk = os.read(self._master, 1 << 16) if ready else b""
            except OSError:  # the last process has closed the terminal
                chunk = b""
            if not chunk:
                part, self._unread = self._unread, b""
                self._stream.feed(part)
                return bool(part)
            self._unread += chunk
        part, bell, self._unread = self._unread.partition(b"\x07")
        self._stream.feed(part + bell)
        return True

    def wait_for(self, condition: Callable[[str], object]) -> str:
        """Read until `condition` holds for the screen; return the screen."""
        while not condition(shown := self.shown()):
            assert self.read(), f"ended:\n{self.everything()}"
        return shown

    def finish(self) -> int:
        """Read until the command ends; return its exit status."""
        while self.read():
            pass
        return self.process.wait(30)

    def shown(self) -> str:
        """Return the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def everything(self) -> str:
        """Return the screen with all lines that have left it at the top."""
        width = self.screen.columns
        above = (
            "".join(line[column].data for column in range(width)).rstrip()
            for line in self.screen.history.top
        )
        return "\n".join([*above, self.shown()])
