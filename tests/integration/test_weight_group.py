"""Weight groups whose members die, hang or fail: the trainer and the others go on."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from areal_lite.config import SyncConfig, TrainConfig
from areal_lite.servers.blocking import start_post
from areal_lite.servers.client import ServerError, ServersFailed
from areal_lite.servers.registry import ServerInfo
from areal_lite.sglang_plugins.weight_group import CollectiveError
from areal_lite.weights import broadcast
from areal_lite.weights.broadcast import Broadcast, FlatBucket, WeightGroup, flatten
from areal_lite.weights.recipients import PushRecipients, PushReport
from tests import nccl_double
from tests.gloo_server import serve
from tests.ranks.processes import processes as forked

pytestmark = pytest.mark.timeout(120)

BUCKET = flatten([("w", torch.randn(1000, 300)), ("v", torch.ones(7, dtype=torch.bfloat16))])
JOIN, RECEIVE = "/init_weights_update_group", "/update_weights_from_distributed"
BACKENDS = ("gloo", nccl_double.NAME)


@contextmanager
def weight_servers(*die_at: str | None, **variables: str):
    """Yield servers as a weight group sees them, and their processes."""
    variables |= {"GLOO_SOCKET_IFNAME": "lo"}
    processes, infos = [], []
    try:
        for i, path in enumerate(die_at):
            port, sender = forked.Pipe(duplex=False)
            process = forked.Process(target=serve, args=(sender, path, variables), daemon=True)
            process.start()
            processes.append(process)
            url = f"http://127.0.0.1:{port.recv()}"
            infos.append(ServerInfo(name=f"s{i}", url=url, api_key=None, tensor_parallel=1, pid=i))
        yield infos, processes
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(autouse=True)
def trainer(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    nccl_double.register()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    monkeypatch.setattr(broadcast, "_GRACE_S", 1.0)
    yield
    for group in made:
        group.break_up()
    dist.destroy_process_group()


made: list[WeightGroup] = []


def group_of(servers: list[ServerInfo], backend: str) -> WeightGroup:
    made.append(WeightGroup(servers, backend, 30, f"areal_lite_{time.monotonic_ns()}"))
    return made[-1]


def send(group: WeightGroup, bucket: FlatBucket = BUCKET) -> None:
    group.send(
        bucket,
        {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": "1"},
    )


def broadcast_of(backend: str) -> Broadcast:
    """Return a transport with a time-out of 2 s."""
    config = TrainConfig(model="m")
    config.sync.timeout_s = 2
    return Broadcast(config, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("path", "dying"), [(JOIN, 1), (RECEIVE, 0), (RECEIVE, 1)])
def test_only_the_server_that_dies_in_a_collective_is_to_blame(backend, path, dying) -> None:
    """The others wait for it in the join or the broadcast, and can make a new group at once."""
    with weight_servers(*(path if i == dying else None for i in range(3))) as (infos, _):
        with pytest.raises(ServersFailed) as failed:
            send(group_of(infos, backend))
        assert [error.server for error in failed.value.errors] == [infos[dying]]
        survivors = [info for i, info in enumerate(infos) if i != dying]
        group = group_of(survivors, backend)
        send(group)
        group.abandon(survivors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hanging", [0, 1])
def test_only_the_server_that_hangs_in_a_collective_is_to_blame(backend, hanging) -> None:
    """Neither gloo nor NCCL notices. The others give up, and take part in the next group."""
    with weight_servers(None, None, None) as (infos, processes):
        group = broadcast_of(backend)
        group.join(infos)
        os.kill(processes[hanging].pid, signal.SIGSTOP)
        with pytest.raises(ServersFailed) as failed:
            group.send(BUCKET, infos, version="1", flush_cache=False)
        assert [error.server for error in failed.value.errors] == [infos[hanging]]
        survivors = [info for i, info in enumerate(infos) if i != hanging]
        group.send(BUCKET, survivors, version="1", flush_cache=False)
        group.leave(survivors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_servers_that_hang_cost_the_others_one_time_out_together(backend) -> None:
    """Two of four: the first attempt blames both, and the second one succeeds."""
    with weight_servers(None, None, None, None) as (infos, processes):
        group, attempts = broadcast_of(backend), []
        group.join(infos)
        for hanging in (1, 2):
            os.kill(processes[hanging].pid, signal.SIGSTOP)

        def attempt(servers: list[ServerInfo]) -> None:
            attempts.append([server.name for server in servers])
            group.send(BUCKET, servers, version="1", flush_cache=False)

        recipients = PushRecipients(infos, PushReport(version=1), SyncConfig(timeout_s=2))
        recipients.run_together(attempt)
        # Each failed attempt costs the time-out: there is one, not one for each server that hangs.
        assert attempts == [["s0", "s1", "s2", "s3"], ["s0", "s3"]]
        group.leave(recipients.servers)


@pytest.mark.parametrize("where", ["CONNECT", "ASYNC"])
def test_a_misconfigured_nccl_is_reported_and_no_server_is_blamed(monkeypatch, where) -> None:
    """Every server fails with it. Restarting them all would fail again."""
    fault = {f"NCCL_DOUBLE_{where}_ERROR": "unhandled cuda error, invalid argument"}
    with weight_servers(None, None, **fault) as (infos, _):
        monkeypatch.setenv(*next(iter(fault.items())))
        with pytest.raises(CollectiveError, match="every server answers.*unhandled cuda error"):
            send(group_of(infos, nccl_double.NAME))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_broadcast_that_fails_on_the_trainer_alone_is_reported_as_what_it_is(backend) -> None:
    """The servers wait for it meanwhile, and are free for the next group."""
    broken = FlatBucket(BUCKET.description, BUCKET.data.to_sparse())
    with weight_servers(None, None) as (infos, _):
        started = time.monotonic()
        with pytest.raises(CollectiveError, match="every server answers.*([Ss]parse|dense)"):
            send(group_of(infos, backend), broken)
        assert time.monotonic() - started < 10
        send(group_of(infos, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_servers_give_up_when_the_trainer_dies(backend) -> None:
    """The store dies with the trainer. A new trainer finds servers that can join."""
    with weight_servers(None, None) as (infos, _):
        dead = group_of(infos, backend)
        request = {"group_name": dead._name, "load_format": "flattened_bucket"}
        calls = [start_post(info, RECEIVE, BUCKET.description | request, 30) for info in infos]
        time.sleep(0.3)  # they wait for the broadcast
        dead._store = None
        for call in calls:
            with pytest.raises(ServerError, match="the collective failed: given up"):
                call.result()
        send(group_of(infos, backend))


def test_the_watchdogs_variable_is_set_for_weight_groups_only() -> None:
    with weight_servers(None) as (infos, _):
        group = group_of(infos, nccl_double.NAME)
        assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
        group.abandon(infos)
