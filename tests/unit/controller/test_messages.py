"""Messages over a socket: a real server in a thread of its own, and real clients."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import zmq

from areal_lite.controller import protocol
from areal_lite.controller.protocol import (
    Address,
    ControllerClient,
    MessageServer,
    PushTargets,
    Resync,
)
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.processes import process_namespace
from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Trajectory
from tests.proxy import Proxy

SERVER = ServerInfo(name="s0", url="http://x", api_key="key", tensor_parallel=2, pid=7)


def a_batch(rank: int) -> TrainBatch:
    n = 3 + rank
    mask = np.arange(n) > 0
    logprobs, versions = np.where(mask, -1.0, 0).astype(np.float32), mask.astype(np.int32) - 1
    return TrainBatch.from_trajectories(
        [
            Trajectory(
                group_id=rank,
                prompt_id="p",
                sample_index=0,
                tokens=np.arange(n, dtype=np.int32),
                loss_mask=mask,
                behavior_logprobs=logprobs,
                versions=versions,
                finish_reason="stop",
                reward=1.0,
            )
        ]
    )


class Answers:
    """Stands in for a controller. `handled` has the calls of methods."""

    def __init__(self) -> None:
        self.handled: list[tuple] = []

    async def pull(self, step: int, rank: int, world: int, resyncs: int) -> tuple:
        self.handled.append(("pull", step, rank, world))
        match step:
            case 9:
                await asyncio.Event().wait()
            case 8:
                raise ValueError("no such step")
            case 6:
                return {"reward_mean": np.float32(0.5)}, a_batch(0).to_frames()
            case 5:
                return {}, [object()]
            case 4 if rank == 9:
                raise KeyError("a bug")
            case 7:
                await asyncio.sleep(0.3)
                return {"step": 7}, a_batch(0).to_frames()
            case 3 if resyncs < 2:
                raise Resync
        return {"step": step, "reward_mean": 0.5}, a_batch(rank).to_frames()

    async def begin_push(self, version: int) -> PushTargets:
        return PushTargets([SERVER], version)

    async def pushed(self, version: int, failed: list[str]) -> None:
        raise RuntimeError(f"{version} {failed}")

    async def evaluate(self, version: int) -> dict:
        self.handled.append(("evaluate", version))
        return {"greedy": 0.25, "versions": [version]}

    async def finish(self) -> dict:
        return {"groups": {"used": 3}}


@pytest.fixture
def answers() -> Answers:
    """Answers the calls that come over `wire`."""
    return Answers()


@pytest.fixture
def wire(tmp_path, answers):
    """Serve in a thread; yield (run directory, function that ends it, list).

    At the end the last element of the list is the server's error.
    """
    started, ended = threading.Event(), threading.Event()
    stop: list = []

    async def serve() -> None:
        server = MessageServer(tmp_path, answers)
        task = asyncio.create_task(server.serve())
        stop.extend([asyncio.get_running_loop(), task, server])
        started.set()
        await asyncio.wait([task])
        stop.append(None if task.cancelled() else task.exception())
        await server.close("it is over")
        ended.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(5)

    def end() -> None:
        if not ended.is_set():
            stop[0].call_soon_threadsafe(stop[1].cancel)
        thread.join(5)

    yield tmp_path, end, stop
    end()


@pytest.fixture
def client(wire):
    client = ControllerClient(wire[0], timeout_s=5)
    yield client
    client.close()


def test_batches_arrive_as_they_were(client: ControllerClient) -> None:
    for rank in range(2):
        batch, info = client.batch(step=4, rank=rank, world=2)
        assert info == {"step": 4, "reward_mean": 0.5}
        for name in TrainBatch.__slots__:
            np.testing.assert_array_equal(getattr(batch, name), getattr(a_batch(rank), name))


def test_resync_is_called_until_the_batch_is_ready(client: ControllerClient) -> None:
    pushes: list[int] = []
    _, info = client.batch(3, 0, 1, lambda: pushes.append(3))
    assert info["step"] == 3 and pushes == [3, 3]


def test_the_other_calls(client: ControllerClient) -> None:
    assert client.begin_push(3) == PushTargets([SERVER], drained=3)
    assert client.evaluate(2) == {"greedy": 0.25, "versions": [2]}
    assert client.finish() == {"groups": {"used": 3}}


def test_errors_have_the_controllers_message(client: ControllerClient) -> None:
    with pytest.raises(RuntimeError, match="no such step"):
        client.batch(8, 0, 1)
    with pytest.raises(RuntimeError, match=r"5 \['s1'\]"):
        client.pushed(5, failed=["s1"])
    assert client.batch(1, 0, 1)[1]["step"] == 1


@pytest.mark.parametrize(
    ("step", "rank", "words"),
    [
        (6, 0, "cannot send the batch of step 6.*TypeError.*numpy.float32"),
        (5, 0, "cannot send.*TypeError"),
        (4, 9, "KeyError: 'a bug'"),
    ],
)
def test_a_failed_reply_is_reported_at_once_and_ends_the_server(
    wire, client: ControllerClient, step, rank, words
) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=words):
        client.batch(step, rank, 1)
    assert time.monotonic() - started < 2
    wire[1]()
    assert isinstance(wire[2][-1], ExceptionGroup), "whoever runs it must hear of it"


def test_a_timeout_names_its_request_and_a_late_reply_is_ignored(wire) -> None:
    client = ControllerClient(wire[0], timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"the batch of step 7 \(rank 0 of 2\)"):
        client.batch(7, 0, 2)
    time.sleep(0.3)  # its answer is there now
    client._timeout_s = 5
    assert client.evaluate(1)["versions"] == [1]
    client.close()


def test_ranks_do_not_wait_for_each_other(wire, client: ControllerClient) -> None:
    other = ControllerClient(wire[0], timeout_s=5)
    slow = threading.Thread(target=lambda: other.batch(7, 0, 1))
    slow.start()
    assert client.batch(1, 0, 1)[1]["step"] == 1 and slow.is_alive()
    slow.join()
    other.close()


def test_open_requests_are_told_why_the_controller_ends(wire) -> None:
    client = ControllerClient(wire[0], timeout_s=10)
    threading.Timer(0.1, wire[1]).start()
    with pytest.raises(RuntimeError, match="it is over"):
        client.batch(9, 0, 1)
    assert not (wire[0] / "controller.json").exists()
    client.close()


def address(run_dir) -> Address:
    return msgspec.json.decode((run_dir / "controller.json").read_bytes(), type=Address)


def host_and_port(run_dir) -> tuple[str, int]:
    url = urlsplit(address(run_dir).url)
    return url.hostname, url.port


@contextlib.contextmanager
def dealer(run_dir, key: str | None = None):
    """A raw socket to the controller, with its key unless another one is given ("": none)."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if key != "":
        socket.curve_serverkey = (key or address(run_dir).key).encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address(run_dir).url)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def request(number: int | float = 1, **fields) -> bytes:
    call = {"number": number, "method": "evaluate", "arguments": [3]}
    return msgspec.msgpack.encode(call | fields)


@pytest.mark.parametrize("key", ["", zmq.curve_keypair()[0].decode()], ids=["none", "another"])
def test_without_the_key_nothing_comes_through(wire, client: ControllerClient, key: str) -> None:
    with dealer(wire[0], key) as stranger:
        for _ in range(10):
            stranger.send(request())
        assert client.evaluate(1)["versions"] == [1]
        assert not stranger.poll(300), "a stranger got an answer"
    with dealer(wire[0]) as known:
        known.send(request(7))
        assert msgspec.msgpack.decode(known.recv())["number"] == 7


def deep(depth: int) -> bytes:
    """A valid request with an unknown field that holds lists in lists."""
    return b"\x84" + request()[1:] + b"\xa1z" + b"\x91" * depth + b"\xc0"


MALFORMED = [
    [b"\x93garbage"],
    [b""],
    [b"", b"", b""],
    [request(), request()],
    [request(1.5)],
    [request(2**64 - 1)[:-1]],
    [request(arguments=["\u0663"])],
    [request(arguments=[3, 4])],
    [request(arguments={"version": 3})],
    [request(method="fly")],
    [request(method="__init__", arguments=[])],
    [deep(1_000)],
    [deep(500_000)],
    [b"\xdf\xff\xff\xff\xff"],
    [b"\x82\xa6number\x01\xa9arguments\xdd\xff\xff\xff\xff"],
]


@pytest.mark.parametrize("frames", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_message_is_dropped(wire, client: ControllerClient, frames) -> None:
    with dealer(wire[0]) as known:
        known.send_multipart(frames)
        known.send(request(2))
        assert msgspec.msgpack.decode(known.recv())["number"] == 2, "only the good one is answered"
    assert client.evaluate(1)["greedy"] == 0.25


def test_malformed_messages_do_not_flood_the_log(wire, caplog) -> None:
    with dealer(wire[0]) as known:
        for _ in range(2_500):
            known.send(b"\xc1")
        known.send(request(2))
        known.recv()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == [
        f"dropped malformed message {number}" for number in (1, 1000, 2000)
    ]


# The start of a connection as ZMTP 3 (https://rfc.zeromq.org/spec/23) has it.
GREETINGS = {
    "silent": b"",
    "half": b"\xff" + bytes(5),
    "null": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32),
    "curve": b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32),
    "http": b"GET / HTTP/1.1\r\n\r\n",
}
LENGTHS = {2**30: b"", 2**62: b"", 2**64 - 1: b""}


@pytest.mark.parametrize("greeting", GREETINGS)
def test_connections_without_a_handshake_end(monkeypatch, tmp_path, greeting: str) -> None:
    """They neither stay nor keep a trainer from being served, whatever they announce."""
    monkeypatch.setattr(protocol, "_HANDSHAKE_MS", 300)

    async def main() -> None:
        server = MessageServer(tmp_path, Answers())
        serving = asyncio.create_task(server.serve())
        strangers = [socket.create_connection(host_and_port(tmp_path)) for _ in range(20)]
        for stranger, length in zip(strangers, [*LENGTHS] * 7):
            stranger.sendall(GREETINGS[greeting] + b"\x02" + length.to_bytes(8, "big") + b"abc")
        with closing(ControllerClient(tmp_path, timeout_s=5)) as client:
            assert (await asyncio.to_thread(client.evaluate, 1))["versions"] == [1]
            for stranger in strangers:
                stranger.settimeout(5)
                with contextlib.suppress(ConnectionError):
                    while await asyncio.to_thread(stranger.recv, 4096):
                        pass  # the server's greeting, then its end
                stranger.close()
            assert (await asyncio.to_thread(client.evaluate, 1))["versions"] == [1]
        serving.cancel()
        await server.close()

    asyncio.run(main())


@contextlib.contextmanager
def separate_server(run_dir, setup: str = "") -> Iterator[int]:
    """Serve in a process of its own, and yield its id."""
    code = f"""
import asyncio, resource, sys
from pathlib import Path
from areal_lite.controller import protocol
from tests.unit.controller.test_messages import Answers
{setup}
asyncio.run(protocol.MessageServer(Path(sys.argv[1]), Answers()).serve())
"""
    server = subprocess.Popen([sys.executable, "-c", code, str(run_dir)])
    try:
        yield server.pid
    finally:
        server.kill()
        server.wait()


def test_a_trainer_is_served_although_strangers_took_every_descriptor(tmp_path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    with separate_server(tmp_path, f"{limit}; protocol._HANDSHAKE_MS = 500"):
        with closing(ControllerClient(tmp_path, timeout_s=20)) as early:
            assert early.evaluate(1)["versions"] == [1]
            where = host_and_port(tmp_path)
            strangers = [socket.create_connection(where) for _ in range(100)]
            assert early.evaluate(2)["versions"] == [2], "a connected trainer waited"
            with closing(ControllerClient(tmp_path, timeout_s=20)) as late:
                assert late.evaluate(3)["versions"] == [3], "a new trainer was not let in"
            for stranger in strangers:
                stranger.close()


def test_large_messages_take_no_memory(tmp_path) -> None:
    with (
        separate_server(tmp_path) as pid,
        closing(ControllerClient(tmp_path, timeout_s=20)) as client,
    ):
        client.evaluate(1)
        before = peak_memory_mb(pid)
        with dealer(tmp_path) as known:
            for _ in range(3):
                known.send(b"\xc1" * (60 << 20), copy=False)
            client.evaluate(1)
            time.sleep(0.5)
        assert peak_memory_mb(pid) - before < 30
        assert client.evaluate(1)["greedy"] == 0.25


def peak_memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def test_address_file_is_for_its_owner_only(wire) -> None:
    assert (wire[0] / "controller.json").stat().st_mode & 0o077 == 0


def test_no_controller(tmp_path) -> None:
    with pytest.raises(TimeoutError, match="controller.json"):
        ControllerClient(tmp_path, timeout_s=0.1)


@contextlib.contextmanager
def another_controller(run_dir: Path, takes_over: bool):
    """Another controller's server, in a thread of its own."""
    started, loops = threading.Event(), []

    async def serve() -> None:
        server = MessageServer(run_dir, Answers(), takes_over=takes_over)
        loops.extend([asyncio.get_running_loop(), asyncio.create_task(server.serve())])
        started.set()
        await asyncio.wait([loops[1]])
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(5)
    try:
        yield
    finally:
        loops[0].call_soon_threadsafe(loops[1].cancel)
        thread.join(5)


@pytest.fixture
def killed(tmp_path) -> Iterator[ControllerClient]:
    """A client of a controller whose process is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    content = {
        "url": "tcp://127.0.0.1:1",
        "key": zmq.curve_keypair()[0].decode(),
        "pid": process.pid,
        "namespace": process_namespace(),
    }
    (tmp_path / "controller.json").write_text(json.dumps(content))
    client = ControllerClient(tmp_path, timeout_s=30)
    yield client
    client.close()


def test_the_next_controller_gets_the_request_again(killed: ControllerClient, tmp_path) -> None:
    with another_controller(tmp_path, takes_over=True):
        assert killed.evaluate(3)["versions"] == [3]
        assert killed.begin_push(4).drained == 4


def test_a_controller_that_starts_anew_is_refused(killed: ControllerClient, tmp_path) -> None:
    with another_controller(tmp_path, takes_over=False):
        with pytest.raises(RuntimeError, match="started anew .* the evaluation at version 3"):
            killed.evaluate(3)


def test_a_dead_controller_is_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("areal_lite.controller.protocol._SUCCESSOR_S", 0.0)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    content = {
        "url": "tcp://127.0.0.1:1",
        "key": zmq.curve_keypair()[0].decode(),
        "pid": process.pid,
        "namespace": process_namespace(),
    }
    (tmp_path / "controller.json").write_text(json.dumps(content))
    client = ControllerClient(tmp_path, timeout_s=30)
    with pytest.raises(RuntimeError, match=f"process {process.pid}.*totals of the run"):
        client.finish()
    client.close()
    (tmp_path / "controller.json").write_text(
        json.dumps(content | {"namespace": "another machine"})
    )
    client = ControllerClient(tmp_path, timeout_s=1.5)
    with pytest.raises(TimeoutError):  # its process id means nothing on this machine
        client.finish()
    client.close()


@contextlib.contextmanager
def connected_by_proxy(run_dir: Path) -> Iterator[tuple[Proxy, ControllerClient]]:
    """A client whose connection to the controller goes through a proxy."""
    file = run_dir / "controller.json"
    content = json.loads(file.read_text())
    real = urlsplit(content["url"])
    proxy = Proxy(lambda _: (real.hostname, real.port))
    file.write_text(json.dumps(content | {"url": f"tcp://127.0.0.1:{proxy.port}"}))
    client = ControllerClient(run_dir, timeout_s=30)
    try:
        yield proxy, client
    finally:
        client.close()
        proxy.close()


LOST = ["while it is handled", "with its reply", "between two requests"]


@pytest.mark.parametrize("lost", LOST)
def test_a_request_survives_its_connection_and_is_handled_once(wire, answers, lost: str) -> None:
    with connected_by_proxy(wire[0]) as (proxy, client):
        assert client.evaluate(1)["versions"] == [1]
        cuts: list[int] = []

        def cut() -> None:
            cuts.append(proxy.cut())
            proxy.delay(0.0)

        if lost == "with its reply":
            proxy.delay(2.0)  # the request takes so long, and its reply would, too
        delays = {"while it is handled": 0.2, "with its reply": 3.0, "between two requests": 0.0}
        later = threading.Timer(delays[lost], cut)
        later.start()
        if lost == "between two requests":
            later.join()
        assert client.batch(7, 0, 1)[1]["step"] == 7
        later.join()
        assert cuts == [1]
        assert client.evaluate(2)["versions"] == [2]
    assert answers.handled == [("evaluate", 1), ("pull", 7, 0, 1), ("evaluate", 2)]


def test_replies_to_clients_that_are_gone_are_forgotten(wire, monkeypatch) -> None:
    monkeypatch.setattr(protocol, "_MAX_CLIENTS", 3)
    for version in range(5):
        with closing(ControllerClient(wire[0], timeout_s=5)) as client:
            assert client.evaluate(version)["versions"] == [version]
            assert client.begin_push(version).drained == version
    assert len(wire[2][2]._newest) == 3
