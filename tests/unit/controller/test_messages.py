"""Messages over a socket: a real server in a thread of its own, and real clients."""

import asyncio
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import zmq

from areal_lite.controller.client import ControllerClient
from areal_lite.controller.message_server import MessageServer
from areal_lite.controller.messages import (
    BatchReady,
    BeginPush,
    Evaluate,
    Evaluation,
    Finish,
    PullBatch,
    Pushed,
    PushTargets,
    Resync,
    RunTotals,
    process_namespace,
)
from areal_lite.servers.registry import ServerInfo
from areal_lite.trajectory import TrainBatch, Trajectory

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


async def handler(request):
    match request:
        case PullBatch(step=9):
            await asyncio.Event().wait()
        case PullBatch(step=8):
            raise ValueError("no such step")
        case PullBatch(step=6):
            return BatchReady({"reward_mean": np.float32(0.5)}), a_batch(0).to_frames()
        case PullBatch(step=5):
            return BatchReady({}), [object()]
        case PullBatch(step=4, rank=9):
            raise KeyError("a bug")
        case PullBatch(step=7):
            await asyncio.sleep(0.3)
            return BatchReady({"step": 7}), a_batch(0).to_frames()
        case PullBatch(step=3, resyncs=resyncs) if resyncs < 2:
            return Resync(), ()
        case PullBatch(step, rank, _):
            return BatchReady({"step": step, "reward_mean": 0.5}), a_batch(rank).to_frames()
        case BeginPush(version):
            return PushTargets([SERVER], version), ()
        case Pushed(version, failed):
            raise RuntimeError(f"{version} {failed}")
        case Evaluate(version):
            return Evaluation({"greedy": 0.25, "versions": [version]}), ()
        case Finish():
            return RunTotals({"groups": {"used": 3}}), ()


@pytest.fixture
def wire(tmp_path):
    """Serve in a thread; yield (run directory, function that ends it, list).

    At the end the last element of the list is the server's error.
    """
    started, ended = threading.Event(), threading.Event()
    stop: list = []

    async def serve() -> None:
        server = MessageServer(tmp_path, handler)
        task = asyncio.create_task(server.serve())
        stop.extend([asyncio.get_running_loop(), task])
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


def test_a_wrong_token_is_refused(wire, client: ControllerClient) -> None:
    client._address.token = "0" * 32
    with pytest.raises(RuntimeError, match="wrong token"):
        client.evaluate(1)


def test_noise_is_ignored(wire, client: ControllerClient) -> None:
    context = zmq.Context()
    noise = context.socket(zmq.DEALER)
    noise.connect(json.loads((wire[0] / "controller.json").read_bytes())["url"])
    noise.send_multipart([b"\x93garbage"])
    noise.send_multipart([b"", b"", b""])
    assert client.evaluate(1)["greedy"] == 0.25
    noise.close(linger=0)
    context.term()


def test_address_file_is_for_its_owner_only(wire) -> None:
    assert (wire[0] / "controller.json").stat().st_mode & 0o077 == 0


def test_no_controller(tmp_path) -> None:
    with pytest.raises(TimeoutError, match="controller.json"):
        ControllerClient(tmp_path, timeout_s=0.1)


def test_a_dead_controller_is_noticed(tmp_path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    address = {
        "url": "tcp://127.0.0.1:1",
        "token": "",
        "pid": process.pid,
        "namespace": process_namespace(),
    }
    (tmp_path / "controller.json").write_text(json.dumps(address))
    client = ControllerClient(tmp_path, timeout_s=30)
    with pytest.raises(RuntimeError, match=f"process {process.pid}.*totals of the run"):
        client.finish()
    client.close()
    (tmp_path / "controller.json").write_text(
        json.dumps(address | {"namespace": "another machine"})
    )
    client = ControllerClient(tmp_path, timeout_s=1.5)
    with pytest.raises(TimeoutError):  # its process id means nothing on this machine
        client.finish()
    client.close()
