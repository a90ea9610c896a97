"""Run the servers or the trainer of a run on a machine that does not see its run directory.

    export AREAL_LITE_KEY=…     # the same random text on every machine
    python -m areal_lite.clusters.join FOLDER HOST:PORT servers FIRST COUNT
    python -m areal_lite.clusters.join FOLDER HOST:PORT trainer [options of torchrun]

HOST:PORT is that of the hub (hub.py). FOLDER takes the place of the run directory on this machine.
A role reads and writes it as ever, and a mirror keeps it equal to the hub's (docs/running.md).

* The role starts when everything that it needs is here. When it has ended, what it wrote goes to
  the hub, and then this command ends with its status.
* Without the hub the role goes on, and the mirror waits.
* SIGTERM asks a trainer to stop after its step, with a checkpoint. Servers end at once.
* Of nodes that train together, rank 0 writes whole checkpoints, which mirrors bring to the others.
"""

import argparse
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from areal_lite.clusters import run_files
from areal_lite.clusters.run_files import Files, Part, Stamp
from areal_lite.config import TrainConfig, load_config
from areal_lite.launch.roles import rank_environment
from areal_lite.run_dir.paths import CHECKPOINT_MARKER, CONFIG_FILE, LOGS_DIR, STOP_FILE
from areal_lite.system.files import new_folder, write_atomically
from areal_lite.system.gpus import resolve_device
from areal_lite.system.processes import dying_with_me, run_role, start_daemon

log = logging.getLogger(__name__)

_INTERVAL_S = {Part.STATE: 0.25, Part.RECORDS: 1.0}
_ASK_AGAIN_S = 10.0
_POLL_S = 0.2
_LAST_WORDS_S = 600.0
_TAIL_BYTES = 1 << 16


class HubRefused(RuntimeError):
    """The hub cannot do a request. The message says why."""


class HubClient:
    """Asks the hub, from one thread. `give_up_at` is a monotonic time, from which it gives up."""

    def __init__(self, address: str):
        self._address = address
        self._client = secrets.token_bytes(8)
        self._number = 0
        self.give_up_at = float("inf")
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.req_relaxed = self._socket.req_correlate = True  # it may ask again
        self._socket.linger = 0
        self._socket.curve_serverkey = run_files.key_pair()[0]
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(f"tcp://{address}")

    def ask(self, method: str, *arguments: Any, answer: Any = Any) -> Any:
        """Call a method of the hub; return the result, as the type `answer`, whenever it comes.

        Raises HubRefused, and TimeoutError at `give_up_at`.
        """
        self._number += 1
        call = run_files.Call(self._client, self._number, method, list(arguments))
        started = time.monotonic()
        while True:
            self._socket.send(msgspec.msgpack.encode(call))
            if self._socket.poll(int(1000 * _ASK_AGAIN_S)):
                break
            waited = (
                f"waited {time.monotonic() - started:.0f} s for the hub at {self._address}: does "
                f"it run there, with the same {run_files.ENV_KEY}?"
            )
            log.warning("%s", waited)
            if time.monotonic() > self.give_up_at:
                raise TimeoutError(waited)
        reply = msgspec.msgpack.decode(self._socket.recv(), type=run_files.Reply)
        if reply.error:
            raise HubRefused(f"the hub at {self._address}: {reply.error}")
        return msgspec.convert(reply.value, answer)

    def fetch(self, name: str, path: Path) -> Stamp | None:
        """Copy a file of the hub to `path`, and return the stamp of the copy."""
        offset = 0
        while data := self.ask("read", name, offset, answer=bytes):
            run_files.write(path, offset, data, last=False)
            offset += len(data)
        return run_files.write(path, offset, b"", last=True)

    def send(self, path: Path, name: str, size: int, held: int) -> Stamp | None:
        """Bring a file up to `size` bytes to the hub, which has the first `held` of them."""
        found = None
        for offset in range(held, size, run_files.CHUNK) or (0,):
            wanted = min(run_files.CHUNK, size - offset)
            if len(data := run_files.read(path, offset, wanted)) < wanted:
                raise FileNotFoundError(f"{path} was replaced")
            if held:
                found = self.ask("extend", name, offset, data, answer=Stamp | None)
            else:
                last = offset + len(data) >= size
                found = self.ask("write", name, offset, data, last, answer=Stamp | None)
        return found


Sides = tuple[Stamp | None, Stamp | None]
"""A file as it is here and at the hub."""


class Mirror:
    """Keeps one part of a run directory equal here and at the hub.

    * A change counts when two looks agree on it: no file travels while it is written, and a file
      that is renamed is never missing. A log of lines travels as it grows.
    * Where both sides have changed, the hub's content wins.
    * The marker of a checkpoint comes last and goes first, so that one with a marker is whole.
    """

    def __init__(self, hub: HubClient, folder: Path, part: Part):
        self.hub = hub
        self.interval_s = _INTERVAL_S[part]
        self._folder, self._part = folder, part
        self._equal: dict[str, Sides] = {}  # when both were equal
        self._seen: dict[str, Sides] = {}  # at the last look

    def look(self) -> bool:
        """Look at both sides once, and carry over what has changed. Return whether they differed.

        Raises HubRefused after all others, and TimeoutError.
        """
        here = run_files.files_of(self._folder, self._part)
        there = self.hub.ask("look", self._part, answer=Files)
        names = here.keys() | there.keys() | self._equal.keys()
        before, self._seen = self._seen, {name: (here.get(name), there.get(name)) for name in names}
        changed = [name for name in names if self._seen[name] != self._equal.get(name)]
        refused = None
        for name in sorted(changed, key=self._turn):
            if before.get(name) == self._seen[name] or self._grows(name):
                try:
                    self._carry(name)
                except FileNotFoundError:
                    pass  # it has gone meanwhile: the next look sees that
                except HubRefused as error:
                    refused = error
        if refused:
            raise refused
        return bool(changed)

    def _turn(self, name: str) -> tuple[bool, bool, str]:
        goes = None in self._seen[name] and name in self._equal
        return goes, name.endswith(CHECKPOINT_MARKER) != goes, name

    def _grows(self, name: str) -> bool:
        """Return whether lines were added to a file here, and nothing was done at the hub."""
        (here, there), (old, old_there) = self._seen[name], self._equal.get(name, (None, None))
        if not here or there != old_there or not name.endswith(".jsonl"):
            return False
        return old is None or (here.inode == old.inode and here.size > old.size)

    def _carry(self, name: str) -> None:
        """Make a file equal on both sides."""
        here, there = self._seen[name]
        changed_there = there != self._equal.get(name, (None, None))[1]
        path = self._folder / name
        held = there.size if there and self._extends(name, changed_there) else 0
        if changed_there and not held:
            here = self.hub.fetch(name, path) if there else path.unlink(missing_ok=True)
        elif here is None:
            self.hub.ask("remove", name)
            there = None
        elif here.size > held or not held:
            there = self.hub.send(path, name, here.size, held)
        self._equal[name] = here, there
        if here is None:
            del self._equal[name]

    def _extends(self, name: str, changed_there: bool) -> bool:
        """Return whether the file begins with all that the hub has of it."""
        here, there = self._seen[name]
        if not here or not there or here.size < there.size:
            return False
        start = 0
        if not changed_there or self._part == Part.STATE:
            if not self._grows(name):
                return False
            # A file that replaces another one may get its inode. The last bytes tell them apart.
            start = max(there.size - _TAIL_BYTES, 0)
        theirs = self.hub.ask("compare", name, start, there.size, answer=int)
        return theirs == run_files.checksum(self._folder / name, start, there.size)


class LogLines:
    """Sends the lines that are added to the logs of this machine to the logs of the hub."""

    interval_s = _INTERVAL_S[Part.RECORDS]

    def __init__(self, hub: HubClient, folder: Path):
        self.hub = hub
        self._folder = folder / LOGS_DIR
        self._sent = {path: path.stat().st_size for path in self._folder.glob("*.log")}

    def look(self) -> bool:
        """Send what has been added. Return whether there was anything."""
        added = False
        for path in self._folder.glob("*.log"):
            while data := run_files.read(path, self._sent.get(path, 0)):
                self.hub.ask("log", path.name, data)
                self._sent[path] = self._sent.get(path, 0) + len(data)
                added = True
        return added


def keep(looker: Mirror | LogLines, ended: threading.Event) -> None:
    """Look again and again. An error is logged once, and does not end this."""
    told = ""
    while not ended.wait(looker.interval_s):
        try:
            looker.look()
        except (HubRefused, OSError) as error:
            if str(error) != told:
                log.warning("%s", error)
            told = str(error)


def settle(looker: Mirror | LogLines, patience_s: float = 0.0) -> None:
    """Look until both sides are equal. Raises an error of the hub that lasts for `patience_s`."""
    looker.hub.give_up_at = time.monotonic() + patience_s if patience_s else float("inf")
    while True:
        try:
            if not looker.look():
                return
        except HubRefused:
            if time.monotonic() > looker.hub.give_up_at or not patience_s:
                raise
        time.sleep(_POLL_S)


def join(address: str, folder: Path, role: str, arguments: list[str]) -> int:
    """Run a role in `folder`, which a mirror keeps equal to the hub's. Returns its exit status."""
    open_folder(HubClient(address), folder)
    parts = (Part.STATE, Part.RECORDS) if role == "trainer" else (Part.STATE,)
    mirrors = [Mirror(HubClient(address), folder, part) for part in parts]
    # In the order in which they leave: a hub waits for no client that never called it.
    lookers = [LogLines(HubClient(address), folder), *mirrors]
    for mirror in mirrors:
        settle(mirror)
    config = load_config(folder)
    check(config)
    copy_model(HubClient(address), Path(config.model))
    command, environment = role_command(role, arguments, config, folder)
    os.environ.pop(run_files.ENV_KEY)
    child = subprocess.Popen(command, env=os.environ | environment)
    signal.signal(signal.SIGTERM, lambda *_: stop(child, folder if role == "trainer" else None))
    ended = threading.Event()
    kept = [start_daemon(keep, looker, ended) for looker in lookers]
    while child.poll() is None:
        for keeper in kept:
            if keeper.done():
                child.terminate()
                keeper.result()
        time.sleep(_POLL_S)
    ended.set()
    log.info("the role has ended: what it wrote goes to the hub")
    for looker, keeper in zip(lookers, kept, strict=True):
        looker.hub.give_up_at = time.monotonic() + _LAST_WORDS_S
        keeper.result()
        settle(looker, _LAST_WORDS_S)
        looker.hub.ask("leave")
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def open_folder(hub: HubClient, folder: Path) -> None:
    """Make `folder`, or clear it of an earlier start. Raises ValueError if it is another's."""
    identity = hub.ask("read", run_files.IDENTITY, 0, answer=bytes)
    own, config = folder / run_files.IDENTITY, run_files.stamp(folder / CONFIG_FILE)
    hub_config = hub.ask("look", Part.STATE, answer=Files).get(CONFIG_FILE)
    hub.ask("leave")
    if config and config == hub_config:
        raise ValueError(f"{folder} is the hub's own run directory: start the role there by itself")
    if not own.exists() and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder")
    if own.exists() and own.read_bytes() != identity:
        raise ValueError(f"{folder} has the files of another run: choose another folder")
    (folder / LOGS_DIR).mkdir(parents=True, exist_ok=True)
    write_atomically(own, identity)
    for name in run_files.files_of(folder, Part.STATE):
        (folder / name).unlink()


def check(config: TrainConfig) -> None:
    """Refuse transports that need a machine in common. Raises ValueError."""
    if (transport := config.sync.transport) in ("disk", "memory"):
        raise ValueError(
            f"sync.transport={transport} needs trainer and servers on one machine: prepare the run "
            "with sync.transport=distributed"
        )


def copy_model(hub: HubClient, model: Path) -> None:
    """Copy the model of the run from the hub, unless this machine has a folder of its name."""
    if not model.exists():
        files = hub.ask("look", Part.MODEL, answer=Files)
        gigabytes = sum(file.size for file in files.values()) / 1e9
        log.info("copying %s: %d files, %.1f GB", model, len(files), gigabytes)
        model.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(model) as scratch:
            for name in files:
                hub.fetch(name, scratch / name.removeprefix(run_files.MODEL))
    hub.ask("leave")


def role_command(
    role: str, arguments: list[str], config: TrainConfig, folder: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a role, and what it needs in its environment."""
    if role == "servers":
        module = [sys.executable, "-m", "areal_lite.launch.server_pool", str(folder)]
        return [*module, *arguments, "until-end"], dying_with_me()
    alone = ["--standalone", f"--nproc-per-node={config.trainer.world_size}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *(arguments or alone)]
    environment = rank_environment(on_gpu=resolve_device(config.trainer.device) == "cuda")
    return [*torchrun, "-m", "areal_lite.trainer.loop", str(folder)], environment


def stop(child: subprocess.Popen, trains_in: Path | None) -> None:
    """Ask a trainer to stop after its step, the first time. End every other child."""
    if trains_in is None or (trains_in / STOP_FILE).exists():
        return child.terminate()
    (trains_in / STOP_FILE).touch()


def address(text: str) -> str:
    """Check the address of a hub, HOST:PORT. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if run_files.port(port) and host and not set(":/") & set(host):
        return text
    raise ValueError(text)


def main() -> int:
    """Join a run. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("hub", metavar="HOST:PORT", type=address)
    parser.add_argument("role", choices=("servers", "trainer"))
    parser.add_argument("arguments", nargs="...", help="FIRST COUNT, or options of torchrun")
    options = parser.parse_args()
    numbers = len(options.arguments) == 2 and all(map(str.isdecimal, options.arguments))
    if options.role == "servers" and not numbers:
        parser.error("servers: give the number of the first one, and how many")
    return run_role(
        lambda folder: sys.exit(join(options.hub, folder, options.role, options.arguments)),
        *(ValueError, HubRefused, OSError, zmq.ZMQError),
    )


if __name__ == "__main__":
    sys.exit(main())
