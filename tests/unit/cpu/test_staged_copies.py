"""Copies of staged weights: the trainer's side, and faults of the network."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest

from areal_lite.cpu.memory import staged as staged_copy
from areal_lite.cpu.memory import transport as sender
from areal_lite.cpu.memory.staged import DATA_OFFSET, Source, StagedCopy, StagedError, StagedFile
from areal_lite.cpu.memory.transport import WeightMemory, WeightSender
from areal_lite.system.processes import process_namespace
from tests.unit.cpu.staged_model import weights

HOST = "127.0.0.1"


@pytest.fixture
def memory():
    made = WeightMemory()
    made.write([list(weights(1).items())], 1)
    yield made
    made.close()


def content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def test_many_servers_receive_the_whole_file_at_once(memory):
    data = os.urandom(5 << 20)
    os.pwrite(memory._descriptor, data, DATA_OFFSET)
    source, copies = memory.source(HOST), [StagedCopy() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda copy: copy.fetch(source), copies))
    sent = content(f"/proc/self/fd/{memory._descriptor}")
    assert len(sent) >= len(data) and all(content(copy.path) == sent for copy in copies)


def test_the_memory_of_a_copy_is_kept(memory):
    copy = StagedCopy()
    copy.fetch(memory.source(HOST))
    mapped = StagedFile(copy.path)
    staged = memory.write([list(weights(2).items())], 2)
    copy.fetch(memory.source(HOST))
    assert mapped.is_current() and mapped.check(staged.header.digest).version == 2


@pytest.mark.parametrize("shown", [b"", b"x" * 16, b"short", bytes(100)], ids=len)
def test_nobody_without_the_token_gets_weights(memory, shown):
    source = memory.source(HOST)
    with socket.create_connection((HOST, source.port), 10) as connection:
        connection.sendall(shown)
        connection.shutdown(socket.SHUT_WR)
        try:
            assert connection.recv(100) == b""
        except ConnectionResetError:
            assert len(shown) > 16, "the rest was not read"


def test_a_stranger_who_says_nothing_is_sent_away(memory, monkeypatch):
    monkeypatch.setattr(sender, "_TOKEN_WITHIN_S", 0.2)
    source = memory.source(HOST)
    with socket.create_connection((HOST, source.port), 10) as connection:
        assert connection.recv(100) == b""
    StagedCopy().fetch(source)


def test_each_run_has_a_token_of_its_own(memory):
    other = WeightSender(HOST, memory._descriptor)
    assert other.source.token != memory.source(HOST).token
    with pytest.raises(StagedError, match="ended too early"):
        StagedCopy().fetch(replace(other.source, port=memory.source(HOST).port))
    other.close()


def test_the_sender_follows_the_address_of_the_machine(memory):
    first = memory.source(HOST)
    assert memory.source(HOST) == first
    second = memory.source("127.0.0.2")
    assert second.address == "127.0.0.2"
    with pytest.raises(StagedError, match=f"no weights from {HOST}:{first.port}, the trainer: "):
        StagedCopy().fetch(first)
    StagedCopy().fetch(second)
    memory.close()
    with pytest.raises(StagedError, match="refused"):
        StagedCopy().fetch(second)


@contextmanager
def trainer_that_sends(data: bytes, hangs: bool = False):
    """Listen as a trainer does, send `data` to the first server, and end the connection or hang."""
    with socket.create_server((HOST, 0)) as listener:
        done = threading.Event()

        def send() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(16)
                connection.sendall(data)
                if hangs:
                    done.wait(10)

        thread = threading.Thread(target=send)
        thread.start()
        yield Source("another machine", HOST, listener.getsockname()[1], "00" * 16)
        done.set()
        thread.join()


LENGTH = (3 * DATA_OFFSET).to_bytes(8, "little")
FAILURES = {  # what the trainer sends, whether it then hangs, the error, and whether a file is left
    "nothing": (b"", False, "ended too early", True),
    "no file": ((100).to_bytes(8, "little"), False, "its file has 100 bytes", True),
    "a length": (LENGTH, False, "ended too early", False),
    "a part": (LENGTH + bytes(2 * DATA_OFFSET), False, "ended too early", False),
    "a part, and hangs": (LENGTH + bytes(2 * DATA_OFFSET), True, "timed out", False),
    "a wrong length": ((2**63).to_bytes(8, "little"), False, "too large", False),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_transfer_that_fails_brings_no_version(memory, monkeypatch, case):
    data, hangs, reason, old_is_left = FAILURES[case]
    monkeypatch.setattr(staged_copy, "_SILENCE_S", 0.3)
    digest = memory.write([list(weights(1).items())], 1).header.digest
    copy = StagedCopy()
    copy.fetch(memory.source(HOST))
    with trainer_that_sends(data, hangs) as source, pytest.raises(StagedError, match=reason):
        copy.fetch(source)
    if old_is_left:
        StagedFile(copy.path).check(digest)
    else:
        with pytest.raises(StagedError, match="not whole"):
            StagedFile(copy.path).check(digest)
    copy.fetch(memory.source(HOST))
    StagedFile(copy.path).check(digest)


def test_only_processes_that_share_the_namespace_map_the_file(memory):
    source, path = memory.source(HOST), f"/proc/self/fd/{memory._descriptor}"
    assert source.namespace == process_namespace() and source.can_map(path)
    assert not source.can_map("/proc/0/fd/3")
    assert not replace(source, namespace="another machine").can_map(path)


@pytest.mark.parametrize("manifest", [None, {}, {"namespace": "n", "address": "a", "port": "b"}])
def test_a_request_without_a_source_is_refused(manifest):
    with pytest.raises(StagedError, match="names no source of the weights: "):
        Source.parse(manifest)
