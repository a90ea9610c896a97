"""Mutated requests over real sockets: the controller drops them, and serves its trainer.

`tests/unit/controller/test_messages.py` has the attacks without a key: the handshake, connections
that are half open, large messages, descriptors.
"""

import asyncio
import random
import socket
import time
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from areal_lite.controller.protocol import (
    Address,
    Call,
    ControllerClient,
    MessageServer,
)
from tests.security.mutation import mutated
from tests.unit.controller.test_messages import Answers

CALLS = {
    "pull": [1, 0, 2, 3],
    "begin_push": [5],
    "pushed": [5, ["s0", "s1"]],
    "evaluate": [7],
}
HONEST = [
    msgspec.msgpack.encode(Call(number, method, arguments))
    for number, (method, arguments) in enumerate(CALLS.items(), start=100)
]
# Lists and objects that claim to be large, deep lists, halves of numbers and texts.
WORDS = [b"\x91" * 2000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
WORDS += [b"\xc1", b"\xc0", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8", b"\x80"]


class Obedient(Answers):
    """Answers at once: what a mutated call asks for does not matter here."""

    async def pull(self, *arguments) -> tuple:
        raise ValueError("no")

    async def begin_push(self, version: int) -> None:
        raise ValueError("no")

    begin = step_done = await_evaluation = finish = begin_push


def fuzz(run_dir: Path, cases: int, seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        server = MessageServer(run_dir, Obedient())
        serving = asyncio.create_task(server.serve())
        address = msgspec.json.decode((run_dir / "controller.json").read_bytes(), type=Address)
        context = zmq.asyncio.Context()
        with closing(ControllerClient(run_dir, timeout_s=20)) as trainer:
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.curve_serverkey = address.key.encode()
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.connect(address.url)
            for case in range(cases):
                frames = [
                    mutated(rng, rng.choice(HONEST), WORDS) for _ in range(rng.choice([1, 1, 1, 2]))
                ]
                await dealer.send_multipart(frames)
                if case % 100 == 99:
                    started = time.monotonic()
                    record = await asyncio.to_thread(trainer.evaluate, case)
                    assert record["versions"] == [case] and time.monotonic() - started < 5
                    while await dealer.poll(0):
                        await dealer.recv_multipart()
            dealer.close()
        context.term()
        assert server._malformed > cases // 3, "nothing came through: the test tests nothing"
        assert not serving.done() and all(reply for _, reply in server._newest.values())
        serving.cancel()
        await server.close()

    asyncio.run(main())


def test_mutated_messages(tmp_path) -> None:
    fuzz(tmp_path, 3_000, seed=1)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32)


def test_mutated_handshakes(tmp_path) -> None:
    """Bytes of connections without the key reach libzmq only, and it survives them."""
    rng = random.Random(2)

    async def main() -> None:
        server = MessageServer(tmp_path, Obedient())
        serving = asyncio.create_task(server.serve())
        url = msgspec.json.decode((tmp_path / "controller.json").read_bytes(), type=Address).url
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        hello = b"\x04\xc8\x05HELLO\x01\x00" + rng.randbytes(192)

        def attack() -> None:
            for _ in range(300):
                with socket.create_connection((host, int(port))) as stranger, suppress(OSError):
                    stranger.sendall(mutated(rng, GREETING + hello, WORDS))

        with closing(ControllerClient(tmp_path, timeout_s=20)) as trainer:
            await asyncio.to_thread(attack)
            assert (await asyncio.to_thread(trainer.evaluate, 3))["versions"] == [3]
        assert not serving.done()
        serving.cancel()
        await server.close()

    asyncio.run(main())


@pytest.mark.slow
def test_many_mutated_messages(tmp_path) -> None:
    for seed in range(3, 23):
        folder = tmp_path / str(seed)
        folder.mkdir()
        fuzz(folder, 20_000, seed)
