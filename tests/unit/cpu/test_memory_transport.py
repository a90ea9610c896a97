"""Weights that a trainer writes into shared memory, and that a server checks and activates."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch

from areal_lite.config import SyncConfig
from areal_lite.cpu.memory import server as memory_plugin
from areal_lite.cpu.memory.staged import ACTIVATE, CHECK, DATA_OFFSET, StagedError, StagedFile
from areal_lite.cpu.memory.transport import MemoryTransport, StagedWeights
from areal_lite.weights.recipients import PushReport
from tests.unit.cpu.staged_model import FusedModel, weights


@pytest.fixture
def memory(monkeypatch):
    for name in ("_staged", "_checked"):
        monkeypatch.setattr(memory_plugin, name, None)
    made = MemoryTransport()
    yield made
    made.close([])


class Server:
    """The two processes of a server, with SGLang's part between the hooks replaced."""

    def __init__(self) -> None:
        self.model = FusedModel()
        self.version = "0"
        self.stock: list[str] = []

    def post(self, body: dict[str, str]) -> tuple[bool, str]:
        request = SimpleNamespace(**{"load_format": None, **body})
        manager = SimpleNamespace(
            auto_create_handle_loop=lambda: None,
            _wait_for_model_update_from_disk=self._load,
            _update_weight_version_if_provided=lambda version: setattr(self, "version", version),
        )

        async def original(_, request, http) -> tuple[bool, str, int]:
            self.stock.append(request.model_path)
            return True, "SGLang's", 0

        return asyncio.run(memory_plugin._handle_request(original, manager, request))[:2]

    async def _load(self, request) -> tuple[bool, str, int]:
        updater = SimpleNamespace(get_model=lambda: self.model)
        answer = memory_plugin._load_weights(
            self._stock, updater, request.model_path, request.load_format, recapture=False
        )
        return *answer, 0

    def _stock(self, updater, path: str, load_format: str, **_) -> tuple[bool, str]:
        raise AssertionError(load_format)

    def check(self, staged: StagedWeights, **lie: str) -> tuple[bool, str]:
        return self.post(staged.request(CHECK) | lie)

    def push(self, staged: StagedWeights) -> tuple[bool, str]:
        checked = self.check(staged)
        return self.post(staged.request(ACTIVATE)) if checked[0] else checked


@pytest.fixture
def server(memory):
    return Server()


def loaded(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    model = FusedModel()
    model.load_weights(tensors.items())
    return model.values()


def test_each_version_arrives_bit_for_bit(memory, server):
    for version in range(8, 13):  # the number of digits changes
        new = weights(version)
        order = list(new.items())[:: (-1) ** version]  # the places in the file change, too
        staged = memory.write([[pair] for pair in order], version)
        assert server.push(staged) == (True, "activated the staged weights")
        assert server.model.values() == loaded(new) and server.version == str(version)


def test_types_and_sizes_of_tensors_are_kept(memory):
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "b": torch.randn(7).half(),
        "c": torch.tensor(2.5),
        "d": torch.randn(4, 6).T,
        "e": torch.empty(0, 3),
    }
    staged = memory.write([list(tensors.items())], 1)
    file = StagedFile(staged.path)
    read = dict(file.tensors(file.check(staged.header.digest)))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def corrupt(descriptor: int, staged: StagedWeights) -> None:
    at = DATA_OFFSET + 17
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 1]), at)


def shorten(descriptor: int, staged: StagedWeights) -> None:
    os.ftruncate(descriptor, os.fstat(descriptor).st_size - 1)


def relabel(descriptor: int, staged: StagedWeights) -> None:
    os.pwrite(descriptor, (9).to_bytes(8, "little"), 24)  # after magic and checksum


def begin_next(descriptor: int, staged: StagedWeights) -> None:
    os.pwrite(descriptor, bytes(DATA_OFFSET), 0)


DAMAGE = {
    corrupt: "does not have its checksum",
    shorten: "bytes, and its table is elsewhere",
    relabel: "does not have its checksum",
    begin_next: "not whole",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_version_reaches_no_model(memory, server, damage):
    assert server.push(memory.write([list(weights(1).items())], 1))[0]
    before = server.model.values()
    staged = memory.write([list(weights(2).items())], 2)
    damage(memory._descriptor, staged)
    success, message = server.push(staged)
    assert not success and DAMAGE[damage] in message
    assert not server.post(staged.request(ACTIVATE))[0], "it was not checked"
    assert server.model.values() == before and server.version == "1"
    whole = memory.write([list(weights(2).items())], 2)
    assert server.push(whole)[0] and server.model.values() == loaded(weights(2))


def test_a_version_that_leaves_a_tensor_out_reaches_no_model(memory, server):
    before = server.model.values()
    success, message = server.push(memory.write([list(weights(k=None).items())], 1))
    assert not success and "parts of qk" in message
    assert server.model.values() == before and server.version == "0"


def test_only_the_version_that_was_checked_is_activated(memory, server):
    staged = memory.write([list(weights().items())], 3)
    for lie in ({"weight_version": "4"}, {"model_path": "/proc/self/exe"}):
        assert not server.check(staged, **lie)[0]
        assert not server.post(staged.request(ACTIVATE))[0]
    assert server.check(staged)[0]
    for lie in ({"weight_version": "4"}, {"model_path": "/proc/self/exe"}):
        success, message = server.post(staged.request(ACTIVATE) | lie)
        assert not success and "was not checked here" in message
    assert server.version == "0" and server.post(staged.request(ACTIVATE))[0]


def test_a_late_activation_finds_the_next_version(memory, server):
    late = memory.write([list(weights(1).items())], 1)
    assert server.check(late)[0]
    before = server.model.values()
    memory.write([list(weights(2).items())], 2)
    success, message = server.post(late.request(ACTIVATE))
    assert not success and "other weights" in message and server.model.values() == before


def test_weights_that_change_during_the_copy_end_the_server(memory, monkeypatch):
    staged = memory.write([list(weights(1).items())], 1)
    run = memory_plugin.LoadPlan.run

    def interrupted(plan) -> None:
        run(plan)
        memory.write([list(weights(2).items())], 2)

    monkeypatch.setattr(memory_plugin.LoadPlan, "run", interrupted)
    with pytest.raises(RuntimeError, match="after a part was copied"):
        memory_plugin.activate(FusedModel(), staged.path, staged.header.digest)


def test_a_path_that_is_no_memory_file_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, message in {
        "/proc/0/fd/3": "scheduler must run as .* or use sync.transport=distributed",
        str(pipe): "not a regular file",
        "/dev/zero": "not a regular file",
    }.items():
        with pytest.raises(StagedError, match=message):
            StagedFile(path)


def test_the_memory_of_a_trainer_is_given_back(memory, server):
    first = memory.write([list(weights(1).items())], 1)
    assert server.push(first)[0]
    other = MemoryTransport()
    second = other.write([list(weights(2).items())], 2)
    server = Server()
    assert server.push(second)[0] and server.model.values() == loaded(weights(2))
    other.close([])
    assert memory_plugin._staged.file.is_current() is False
    with pytest.raises(StagedError):
        StagedFile(second.path)


def test_other_requests_stay_sglangs(memory, server):
    kept = []
    assert server.post({"model_path": "/model"}) == (True, "SGLang's")
    assert server.stock == ["/model"]
    memory_plugin._keep_model_path(lambda *args: kept.append(args), server, "/model", "auto")
    memory_plugin._keep_model_path(
        lambda *args: kept.append(args), server, "/x", "areal_lite_activate:1"
    )
    assert kept == [(server, "/model", "auto")]
    answer = memory_plugin._load_weights(
        lambda self, *args, **options: (args, options), server, "/model", "auto", recapture=True
    )
    assert answer == (("/model", "auto"), {"recapture": True})


def test_a_server_that_hangs_delays_a_push_no_longer_than_a_pause_would(memory):
    limits = []
    recipients = SimpleNamespace(
        report=PushReport(version=1),
        servers=[],
        post=lambda path, body, timeout_s: limits.append(timeout_s),
        sync=SyncConfig(timeout_s=10),
        flush_cache=False,
    )
    memory.transfer(recipients, [list(weights(1).items())], apart=False)
    assert limits == [5]
