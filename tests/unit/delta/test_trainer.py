"""Every server that takes part in a push has the trainer's weights after it, bit for bit."""

import random

import pytest
import torch

from areal_lite.config import SyncConfig
from areal_lite.delta.server import DELTA, Changes
from areal_lite.delta.trainer import Deltas
from areal_lite.servers.registry import ServerInfo
from areal_lite.sglang_plugins.load_plan import LoadError
from areal_lite.weights.recipients import PushRecipients, PushReport
from tests.unit.delta.test_server import BF16, ServerModel, split, weights


def info(name: str, pid: int = 1) -> ServerInfo:
    return ServerInfo(name=name, url="http://s", api_key=None, tensor_parallel=1, pid=pid)


class Server:
    """The plugin's half, without HTTP."""

    def __init__(self, name: str, start: int):
        self.info = info(name, start)
        self.model = ServerModel()
        self.changes = Changes(self.model)

    def take(self, bucket) -> None:
        door, before, after, size = bucket.load_format.split(":")
        assert door == DELTA
        if int(size):
            data = bucket.data.numpy().tobytes()
            assert len(data) == int(size)
            self.changes.add(before, after, data, bucket.description["names"])
            return
        tensors = split(bucket)
        self.changes.replace(before, after, bucket.data, tensors)
        self.model.load_weights(tensors)


class Trainer:
    """Pushes the weights of a step to servers, of which any may fail at any bucket."""

    def __init__(self) -> None:
        self.deltas = Deltas()
        self.tensors = weights(0)
        self.sent = 0

    def train(self, rng: random.Random) -> None:
        for _, tensor in self.tensors:
            flat = tensor.view(-1).view(torch.int16)
            flat[rng.randrange(len(flat))] += rng.choice([-1, 1])

    def buckets(self):
        yield self.tensors[:4]
        yield self.tensors[4:]

    def push(self, servers: list[Server], failing=lambda: False, *, apart=False) -> list[Server]:
        """Return the servers that remain in the push."""
        push = PushRecipients([one.info for one in servers], PushReport(version=1), SyncConfig())
        for bucket in self.deltas.pack(self.buckets(), push, apart):
            self.sent += bucket.data.nbytes
            again = True
            while again:  # the others take a bucket again when one has failed
                again = False
                for server in list(servers):
                    early, late = failing(), failing()
                    try:
                        if not early:
                            server.take(bucket)
                        ok = not (early or late)
                    except LoadError:
                        ok = False
                    if not ok:
                        servers.remove(server)
                        push.servers.remove(server.info)
                        again = True
        return servers


def assert_same(trainer: Trainer, servers: list[Server]) -> None:
    expected = ServerModel()
    expected.load_weights(trainer.tensors)
    for server in servers:
        assert server.model.bits() == expected.bits()


def test_a_thousand_pushes_with_lost_servers_leave_no_bit_wrong():
    rng, trainer, starts = random.Random(0), Trainer(), iter(range(10**6))
    current, stale, lost = [], [Server(name, next(starts)) for name in "abc"], 0
    for step in range(1000):
        if step:
            trainer.train(rng)
        if stale and rng.random() < 0.7:  # between two pushes, perhaps of weights of their own
            waiting, stale = stale, []
            current += trainer.push(waiting, apart=bool(current))
            assert_same(trainer, current[-len(waiting) :])
            trainer.train(rng) if rng.random() < 0.3 else None
        before = list(current)
        current = trainer.push(current, lambda: rng.random() < 0.005)
        assert_same(trainer, current)
        gone = [one for one in before if one not in current]
        lost += len(gone)
        # It is started again, or it only missed the push.
        stale += [rng.choice([one, Server(one.info.name, next(starts))]) for one in gone]
    assert lost > 20 and trainer.sent < 0.9 * 1000 * sum(t.nbytes for _, t in trainer.tensors)


def test_servers_get_whole_weights_first_and_then_what_has_changed():
    trainer, servers = Trainer(), [Server("a", 0), Server("b", 1)]
    report = PushReport(version=1)
    for step in range(3):
        push = PushRecipients([one.info for one in servers], report, SyncConfig())
        packed = list(trainer.deltas.pack(trainer.buckets(), push, False))
        whole = [bucket.load_format.endswith(":0") for bucket in packed]
        assert whole == [step == 0] * 2
        for bucket in packed:
            for server in servers:
                server.take(bucket)
        assert_same(trainer, servers)
        trainer.tensors[0][1].view(torch.int16)[0] += 1


def test_large_buckets_travel_as_changes_and_are_counted():
    deltas, report = Deltas(), PushReport(version=1)
    push = PushRecipients([info("a")], report, SyncConfig())
    tensor = torch.randn(10**5).to(BF16)
    sent = []
    for _ in range(3):
        report.megabytes += tensor.nbytes / 2**20
        (bucket,) = deltas.pack([[("w", tensor)]], push, False)
        sent.append(bucket.data.nbytes)
        tensor.view(torch.int16)[::100] += 1
    assert sent[0] == tensor.nbytes and max(sent[1:]) < tensor.nbytes / 50
    assert report.megabytes == pytest.approx(sum(sent) / 2**20)


def test_what_changes_in_every_bit_travels_whole():
    deltas, report = Deltas(), PushReport(version=1)
    push = PushRecipients([info("a")], report, SyncConfig())
    for seed in range(3):
        tensor = torch.randn(10**4, generator=torch.Generator().manual_seed(seed))
        (bucket,) = deltas.pack([[("w", tensor)]], push, False)
        assert bucket.data.nbytes == tensor.nbytes and bucket.load_format.endswith(":0")
