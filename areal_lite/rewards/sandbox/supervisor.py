"""Bound the number of threads, files and folders of a sandboxed program.

The kernel has no such limit for every user. It asks here about each creation (seccomp_unotify(2)),
and the program waits for the answer. A yes lets the call continue as it is: the kernel has read
the numbers among its arguments, which decide, and the program cannot change them.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import signal
import struct
from contextlib import suppress

from areal_lite.rewards.sandbox.system_calls import CALLS, number_of

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
# The id and the thread, flags, the number of the call; the rest of struct seccomp_notif.
_NOTIFICATION = struct.Struct("=QIIi60x")
_RESPONSE = struct.Struct("=QqiI")  # the id, the value, minus the error, flags
_CONTINUE = 1
_MOST_ANSWERS = 5000  # 0.1 s of the event loop
_CLONE = next(number_of(call, os.uname().machine) for call in CALLS if call.name == "clone")


class Supervisor:
    """Answers about one program, on the running event loop.

    Of `threads`, which live at the same time, the bound is not sharp: threads that create others at
    the same moment can reach twice as many. `files` is the number of creations in all; a file that
    is removed still counts, and so does an opening that would create a file if there were none.
    Answers take time from the event loop, so a program that asks too often is killed.
    """

    def __init__(self, listener: int, pid: int, *, threads: int, files: int) -> None:
        self._listener = listener
        self._pid = pid
        self._answers_left = _MOST_ANSWERS
        self._threads = threads
        self._files_left = files
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener, self._answer)

    def close(self) -> None:
        """Stop answering. From now on the kernel refuses every question."""
        self._loop.remove_reader(self._listener)
        os.close(self._listener)

    def _answer(self) -> None:
        events = self._poll.poll(0)
        if events and not events[0][1] & select.POLLIN:  # the program has ended
            self._loop.remove_reader(self._listener)
        if not events or not events[0][1] & select.POLLIN:
            return
        notification = bytearray(_NOTIFICATION.size)
        with suppress(FileNotFoundError):  # the call was interrupted
            fcntl.ioctl(self._listener, _RECEIVE, notification)
            self._answers_left -= 1
            if self._answers_left < 0:
                os.kill(self._pid, signal.SIGKILL)  # it waits, so the number is still its own
                return
            number, _, _, call = _NOTIFICATION.unpack(notification)
            error = self._refusal(call)
            flags = 0 if error else _CONTINUE
            fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(number, 0, -error, flags))

    def _refusal(self, call: int) -> int:
        """Return the error number for a creation, or 0 to allow it."""
        if call == _CLONE:
            with suppress(OSError):
                if len(os.listdir(f"/proc/{self._pid}/task")) < self._threads:
                    return 0
            return errno.EAGAIN
        self._files_left -= 1
        return 0 if self._files_left >= 0 else errno.EDQUOT
