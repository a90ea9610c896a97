"""A run with servers that lie, each in its own way, among honest ones."""

import json
import time

from areal_lite.controller.protocol import ControllerClient
from areal_lite.servers.blocking import post_each
from areal_lite.servers.client import ServerError
from areal_lite.servers.registry import announced_servers
from tests.integration.controller_run import GROUPS, assert_exact, assert_store_matches
from tests.lying_sglang import LIARS

HONEST = ["honest-0", "honest-1"]
LEAST_STEPS = 4
# A liar is found out when it gets a request. That about its health is found after some time, since
# all liars are one process, which the endless answer keeps busy.
PATIENCE_S = 60.0


def push(client: ControllerClient, version: int) -> list[str]:
    """Push as the trainer does: servers that fail leave the push. Return the others."""
    servers = client.begin_push(version).servers
    failed: list[ServerError] = []
    body = {"model_path": "m", "weight_version": str(version)}
    for path, content in (
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weights_from_disk", body),
        ("/continue_generation", {}),
    ):
        failed += post_each(servers, path, content, 10)
        servers = [server for server in servers if server not in {e.server for e in failed}]
    client.pushed(version, [error.server.name for error in failed])
    return [server.name for server in servers]


def test_a_run_with_lying_servers_loses_nothing_and_names_them(run) -> None:
    settings = {"sync__timeout_s": 10.0}
    r = run(max_staleness=2, trainer__steps=10_000, **settings)
    r.start("liars", "-m", "tests.lying_sglang", str(r.path))
    for name in HONEST:
        r.start_server(name)
    deadline = time.monotonic() + 30
    while len(announced_servers(r.path)) < len(LIARS) + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    client = r.start_controller()
    used: dict[int, list[int]] = {}
    pushed: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(used) < LEAST_STEPS or pushed != HONEST:
        assert time.monotonic() < deadline, f"a liar was not found: {pushed}"
        step = len(used)
        batch, info = client.batch(step, 0, 1)
        assert_exact(batch)
        used[step] = sorted(set(batch.group_ids.tolist()))
        assert len(used[step]) == GROUPS and info["failed_rollouts"] == 0
        pushed = push(client, step + 1)
    totals = client.finish()
    assert r.processes["controller"].wait(20) == 0, r.log()
    assert_store_matches(r, totals, used)
    for name in LIARS:
        marked = json.loads((r.path / "servers" / f"{name}.unhealthy").read_text())
        assert f"server {name} " in marked["reason"], marked
        assert f"server {name} " in r.log()
    assert not list((r.path / "servers").glob("honest-*.unhealthy"))
