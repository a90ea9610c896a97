"""Test what `areal-lite servers` lists and refuses. Servers and controller are fakes."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from areal_lite.config import TrainConfig, save_config
from areal_lite.controller.protocol import Address
from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase, write_status
from areal_lite.servers.registry import (
    UNPUSHED,
    ServerInfo,
    announce_server,
    announced_servers,
    drain_server,
    withdraw_server,
)
from areal_lite.system.processes import process_namespace
from areal_lite.tools import servers
from areal_lite.tools.commands import ServersConfig
from areal_lite_quickstart.make_model import build_char_tokenizer
from tests.fake_sglang import FakeSGLang

STATUS = ControllerStatus(
    version=7,
    step=7,
    trainer=TrainerPhase.TRAINING,
    batch_step=None,
    missing_groups=0,
    queued_groups=0,
    running_groups=0,
    capacity=None,
    in_flight=0,
    concurrency_limit=1,
    requests=0,
    servers_ready=1,
    servers_announced=1,
    evaluating=[],
)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run whose controller is in this process."""
    model = tmp_path / "model"
    model.mkdir()
    build_char_tokenizer().save_pretrained(model)
    (model / "config.json").write_text("{}")
    return make_run(tmp_path / "run", str(model))


def make_run(folder: Path, model: str, host: str = "127.0.0.1") -> Path:
    config = TrainConfig(model=model, run_dir=str(folder))
    config.server.device, config.server.host = "cpu", host
    save_config(config, folder)
    (folder / "logs").mkdir()
    controller_of(folder, process_namespace())
    return folder


def controller_of(run_dir: Path, namespace: str) -> None:
    address = Address(url="tcp://127.0.0.1:1", key="k", pid=1, namespace=namespace)
    (run_dir / "controller.json").write_bytes(msgspec.json.encode(address))


def announce(run_dir: Path, name: str, url: str = "http://127.0.0.1:9") -> None:
    info = ServerInfo(name=name, url=url, api_key=None, tensor_parallel=1, pid=1)
    announce_server(run_dir, info)


def test_each_server_is_listed_with_its_state(run_dir):
    write_status(run_dir, STATUS)

    async def look() -> None:
        fakes = {name: FakeSGLang(weight_version=version) for name, version in VERSIONS.items()}
        urls = {name: await fake.start() for name, fake in fakes.items()}
        for name, url in urls.items():
            announce(run_dir, name, url)
        announce(run_dir, "server-3")
        drain_server(run_dir, "server-2")
        rows = await servers.list_servers(run_dir)
        for fake in fakes.values():
            await fake.stop()
        assert rows == [
            ("server-0", urls["server-0"], "ready", "7", "0"),
            ("server-1", urls["server-1"], "waits for version 7", "none", "0"),
            ("server-2", urls["server-2"], "draining", "6", "0"),
            ("server-3", "http://127.0.0.1:9", "no answer", "", ""),
        ]

    asyncio.run(look())


VERSIONS = {"server-0": "7", "server-1": UNPUSHED, "server-2": "6"}


def test_a_run_may_have_no_server_now(run_dir, capsys):
    assert servers.run(ServersConfig(run_dir=str(run_dir))) == 0
    assert capsys.readouterr().out.split() == ["name", "address", "state", "version", "requests"]


def refusal(run_dir: Path, **settings) -> str:
    with pytest.raises(ValueError) as refused:
        servers.check(ServersConfig(run_dir=str(run_dir), **settings))
    return str(refused.value)


def test_a_drained_server_must_exist_and_not_be_the_last(run_dir):
    announce(run_dir, "server-0")
    assert "no such server" in refusal(run_dir, drain="x") and "server-0" in refusal(
        run_dir, drain="x"
    )
    assert f"add one first (areal-lite servers {run_dir} add=1)" in refusal(
        run_dir, drain="server-0"
    )
    announce(run_dir, "server-1")
    servers.check(ServersConfig(run_dir=str(run_dir), drain="server-0"))
    assert "give one of them at a time" in refusal(run_dir, drain="server-0", add=1)


def test_a_drain_ends_when_the_server_is_gone(run_dir, monkeypatch, capsys):
    announce(run_dir, "server-0")
    looks: list[list[str]] = []

    def sleep(_: float) -> None:
        looks.append([server.name for server in announced_servers(run_dir)])
        if len(looks) == 3:
            withdraw_server(run_dir, "server-0")

    monkeypatch.setattr(servers.time, "sleep", sleep)
    assert servers.run(ServersConfig(run_dir=str(run_dir), drain="server-0")) == 0
    assert looks == [[], [], []], "it takes no requests from the start"
    assert capsys.readouterr().out.endswith("server-0 has ended\n")


def test_servers_are_added_to_a_run_that_goes_on(run_dir):
    servers.check(ServersConfig(run_dir=str(run_dir), add=1))
    (run_dir / "controller.json").unlink()
    assert refusal(run_dir, add=1) == f"run_dir={run_dir}: no run is going on there, start it first"


def test_the_model_must_be_where_the_run_found_it(run_dir, tmp_path):
    other = make_run(tmp_path / "other", "models/gone")
    assert "model=models/gone: no config.json there" in refusal(other, add=1)


@pytest.mark.parametrize("host, fits", [("127.0.0.1", False), ("node", True)])
def test_a_server_elsewhere_needs_an_address_that_the_run_reaches(run_dir, tmp_path, host, fits):
    other = make_run(tmp_path / "other", str(tmp_path / "model"), host)
    controller_of(other, "far-away pid:[1]")
    if fits:
        return servers.check(ServersConfig(run_dir=str(other), add=1))
    assert "the run is elsewhere, on far-away," in refusal(other, add=1)
    assert "start the run with server.host=node" in refusal(other, add=1)


def test_two_commands_never_take_one_name(tmp_path):
    (tmp_path / "server-2.log").touch()
    assert servers.claim_numbers(tmp_path, 1, 2) == [1, 3]
    assert servers.claim_numbers(tmp_path, 1, 2) == [4, 5]
