"""Share the run directory with machines that do not see it.

    export AREAL_LITE_KEY=…     # the same random text on every machine
    python -m areal_lite.clusters.hub RUN_DIR PORT [ADDRESS]

runs on the controller's machine, before, beside and after the controller. Other machines join with
`python -m areal_lite.clusters.join` (join.py). What they write arrives here, and this run directory
tells the whole story of the run. The hub ends when the run is complete and every machine has left.
It may be started again at any time: it has no state but the files.
"""

import argparse
import logging
import secrets
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import zmq

from areal_lite.clusters import run_files
from areal_lite.config import load_config
from areal_lite.run_dir.paths import CHECKPOINT_MARKER, LOGS_DIR, TOTALS_FILE
from areal_lite.system.files import remove_unread, write_atomically
from areal_lite.system.network import NODE, listen_address
from areal_lite.system.processes import die_with_parent, run_role

log = logging.getLogger(__name__)

_POLL_MS = 1000
_SILENCE_S = 60.0  # a machine that asks nothing for so long is gone
_MOST_BYTES = 2 * run_files.CHUNK
_HANDSHAKE_MS = 5000


class Hub:
    """Answers the calls of the machines that have joined, one after the other."""

    def __init__(self, run_dir: Path, port: int, host: str | None = None):
        """Listen on `host`: by default this machine's own address."""
        self._run_dir = run_dir.resolve()
        if not (identity := self._run_dir / run_files.IDENTITY).exists():
            write_atomically(identity, secrets.token_hex(8))
        self._model = Path(load_config(run_dir).model)
        # The newest call of each machine with its answer, and when it came.
        self._answered: dict[bytes, tuple[int, bytes, float]] = {}
        self._socket = zmq.Context.instance().socket(zmq.REP)
        self._socket.curve_secretkey = run_files.key_pair()[1]
        self._socket.curve_server = True
        self._socket.maxmsgsize = _MOST_BYTES
        self._socket.handshake_ivl = _HANDSHAKE_MS
        self._socket.linger = 0
        self.url = f"tcp://{host or listen_address(NODE)}:{port}"
        self._socket.bind(self.url)

    def serve(self) -> None:
        """Answer until the run is complete and every machine has left."""
        while not self._is_over():
            if self._socket.poll(_POLL_MS):
                self._socket.send(self._answer(self._socket.recv()))

    def _is_over(self) -> bool:
        now = time.monotonic()
        present = any(now - heard < _SILENCE_S for *_, heard in self._answered.values())
        return not present and (self._run_dir / TOTALS_FILE).exists()

    def _answer(self, message: bytes) -> bytes:
        try:
            call = msgspec.msgpack.decode(message, type=run_files.Call)
            arguments = msgspec.convert(call.arguments, _PARAMETERS[call.method])
        except Exception as error:  # decoders raise more than ValueError, such as RecursionError
            log.warning("dropped a malformed message: %s: %s", type(error).__name__, error)
            return msgspec.msgpack.encode(run_files.Reply(error="the message is malformed"))
        number, reply, _ = self._answered.get(call.client, (0, b"", 0.0))
        if call.number != number:
            reply = self._reply(call.method, arguments)
        self._answered[call.client] = (call.number, reply, time.monotonic())
        if call.method == "leave":
            del self._answered[call.client]
        return reply

    def _reply(self, method: str, arguments: tuple[Any, ...]) -> bytes:
        try:
            reply = run_files.Reply(getattr(self, method)(*arguments))
        except Exception as error:
            if not isinstance(error, OSError | ValueError):
                log.exception("a call failed: %s", method)
            reply = run_files.Reply(error=str(error) or type(error).__name__)
        return msgspec.msgpack.encode(reply)

    def look(self, part: run_files.Part) -> run_files.Files:
        """Return the files that the run has of this part."""
        if part != run_files.Part.MODEL:
            return run_files.files_of(self._run_dir, part)
        return {
            run_files.MODEL + path.name: found
            for path in self._model.glob("[!.]*")
            if (found := run_files.stamp(path.resolve()))  # a link, in a cache of Hugging Face
        }

    def read(self, name: str, offset: int) -> bytes:
        """Return the bytes of a file from `offset` on, at most CHUNK; b"" at its end."""
        return run_files.read(self._source(name), offset)

    def write(self, name: str, offset: int, data: bytes, last: bool) -> run_files.Stamp | None:
        """Write a chunk. The file appears, in one step, with its last chunk."""
        return run_files.write(self._place(name), offset, data, last)

    def extend(self, name: str, size: int, data: bytes) -> run_files.Stamp | None:
        """Append to a file that had `size` bytes."""
        with open(path := self._place(name), "ab") as file:
            if file.tell() != size:
                raise ValueError(f"{path.name} has {file.tell()} bytes here, not {size}")
            file.write(data)
        return run_files.stamp(path)

    def compare(self, name: str, start: int, end: int) -> int:
        """Return the CRC-32 of the bytes of a file from `start` to `end`."""
        return run_files.checksum(self._place(name), start, end)

    def remove(self, name: str) -> None:
        """Remove a file. The marker of a checkpoint takes its folder along."""
        if (path := self._place(name)).name != CHECKPOINT_MARKER:
            path.unlink(missing_ok=True)
        elif path.exists() and not remove_unread(path):
            raise ValueError(f"{path.parent} is being read")

    def log(self, name: str, data: bytes) -> None:
        """Append lines to a log, to which several machines may write."""
        with open(self._run_dir / LOGS_DIR / Path(name).name, "ab") as file:
            file.write(data)

    def leave(self) -> None:
        """Say that a machine needs no more."""

    def _source(self, name: str) -> Path:
        """Return the path of a file that may be read. Raises ValueError for every other."""
        if name == run_files.IDENTITY:
            return self._run_dir / name
        if name.startswith(run_files.MODEL):
            return self._model / Path(name.removeprefix(run_files.MODEL)).name
        return self._place(name)

    def _place(self, name: str) -> Path:
        """Return the path of a file that travels. Raises ValueError for every other."""
        parts = Path(name)
        unfinished = any(map(run_files.is_unfinished, parts.parts))
        travels = parts.parts and (run_files.is_state(parts) or run_files.is_record(parts))
        if unfinished or not travels or name.startswith(run_files.MODEL):
            raise ValueError(f"{name!r:.200} is not a file of a run that travels")
        path = self._run_dir / parts
        if not path.resolve().is_relative_to(self._run_dir):
            raise ValueError(f"{name!r:.200} leads out of {self._run_dir}")
        return path


_CALLED = (Hub.look, Hub.read, Hub.write, Hub.extend, Hub.compare, Hub.remove, Hub.log, Hub.leave)
# The methods that machines may call, and the types of their arguments.
_PARAMETERS: dict[str, Any] = {
    method.__name__: tuple[*list(get_type_hints(method).values())[:-1]] for method in _CALLED
}


def main() -> int:
    """Serve one run directory. Returns the exit status."""
    die_with_parent()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dir")
    parser.add_argument("port", type=run_files.port)
    parser.add_argument("address", nargs="?", help="to listen on; this machine's own by default")
    options = parser.parse_args()

    def work(run_dir: Path) -> None:
        hub = Hub(run_dir, options.port, options.address)
        log.info("%s is shared at %s", run_dir, hub.url)
        hub.serve()

    return run_role(work, ValueError, OSError, zmq.ZMQError)


if __name__ == "__main__":
    sys.exit(main())
