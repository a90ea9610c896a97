"""A push to servers of which one misbehaves: exactly that one leaves, and the others resume."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from areal_lite.config import SyncConfig, TrainConfig
from areal_lite.controller.protocol import PushTargets
from areal_lite.cpu.memory.transport import take_turns
from areal_lite.servers.client import ServerError, ServersFailed
from areal_lite.servers.registry import ServerInfo
from areal_lite.sglang_plugins.weight_group import CollectiveError
from areal_lite.weights.push import Folder, Pusher, WeightPusher, make_pusher
from areal_lite.weights.recipients import PushRecipients, PushReport

CPU = torch.device("cpu")


class Answers:
    """An HTTP server on loopback that counts calls by path and refuses those in `bad`."""

    def __init__(self, name: str, bad: tuple[str, ...] = ()):
        self.calls: Counter[str] = Counter()
        self.bodies: dict[str, dict] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                outer.calls[self.path] += 1
                outer.bodies[self.path] = json.loads(raw)
                body = json.dumps({"success": self.path not in bad, "message": "refused"}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.info = ServerInfo(
            name=name,
            url=f"http://127.0.0.1:{self.server.server_port}",
            api_key=None,
            tensor_parallel=1,
            pid=1,
        )

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def answers():
    made = []

    def make(name: str, *bad: str) -> Answers:
        made.append(Answers(name, bad))
        return made[-1]

    yield make
    for server in made:
        server.close()


def recipients(*servers: Answers, interrupt: str = "in_place", version: int = 1) -> PushRecipients:
    infos, report = [s.info for s in servers], PushReport(version=version)
    return PushRecipients(infos, report, SyncConfig(timeout_s=10), interrupt)


def test_the_server_that_fails_leaves_and_the_others_are_not_asked_twice(answers):
    """A second /begin_weight_update would be refused by a server whose session is open."""
    good, bad = answers("good"), answers("bad", "/begin_weight_update")
    push = recipients(good, bad)
    with push.paused():
        push.post("/begin_weight_update", {})
    assert push.servers == [good.info] and push.report.failed == ["bad"]
    assert good.calls == {
        "/pause_generation": 1,
        "/begin_weight_update": 1,
        "/continue_generation": 1,
    }
    assert bad.calls["/continue_generation"] == 0, "its weights may be half new: it must not go on"


WAKE = "/resume_memory_occupation"


def test_parked_servers_wake_for_the_weights_first(answers):
    server, bad = answers("good"), answers("bad", WAKE)
    push = recipients(server, bad)
    push.parked, push.report.paused_at = True, 1.0
    with push.paused():
        assert server.calls == {"/pause_generation": 1, WAKE: 1}
        assert server.bodies[WAKE] == {"tags": ["weights"]}
        assert push.servers == [server.info], "it has no memory for weights"
    assert server.calls == {"/pause_generation": 1, WAKE: 2, "/continue_generation": 1}
    assert server.bodies[WAKE] == {"tags": ["kv_cache"]}
    assert bad.calls["/continue_generation"] == 0
    assert push.report.pause_s > 1000, "the pause has begun with the turn"


def first_pusher(tmp_path: Path, *servers: ServerInfo) -> WeightPusher:
    """Return a pusher of one tensor, by a folder, that has pushed nothing yet."""
    (tmp_path / "config.json").write_text("{}")
    config = TrainConfig(model=str(tmp_path))
    config.sync.transport = "disk"
    controller = SimpleNamespace(
        begin_push=lambda version: PushTargets(list(servers)), pushed=lambda version, failed: None
    )
    weights = SimpleNamespace(buckets=lambda size: iter([[("w", torch.ones(2))]]))
    return WeightPusher(weights, CPU, controller, config, tmp_path)


def test_a_first_push_that_all_servers_refuse_names_transport_and_server(answers, tmp_path):
    bad = answers("bad", "/update_weights_from_disk")
    with pytest.raises(ValueError, match=r"sync.transport=disk .* version 0 to bad: .*refused"):
        first_pusher(tmp_path, bad.info).push_stale(0)


def test_a_first_push_may_lose_servers_if_one_takes_it_or_they_are_down(answers, tmp_path):
    good, bad = answers("good"), answers("bad", "/update_weights_from_disk")
    pusher = first_pusher(tmp_path, good.info, bad.info)
    assert pusher.push_stale(0).failed == ["bad"] and pusher.servers == [good.info]
    pusher._controller.begin_push = lambda version: PushTargets([bad.info])
    assert pusher.push_all(1).failed == ["bad"], "the transport works: only this server does not"
    bad.close()
    assert first_pusher(tmp_path, bad.info).push_stale(0).failed == ["bad"]


def test_a_collective_that_fails_with_no_server_to_blame_names_the_transport(answers, tmp_path):
    def fail(*_: object, **__: object) -> None:
        raise CollectiveError("no route to host")

    pusher = first_pusher(tmp_path, answers("a").info)
    pusher._transport = SimpleNamespace(transfer=fail)
    with pytest.raises(ValueError, match=r"sync.transport=disk .* to a: .*no route to host"):
        pusher.push_stale(0)


def test_the_servers_of_a_first_push_take_it_together(answers, tmp_path):
    """A group apart would be left after the push, and made again at the next one."""
    calls = []
    pusher = first_pusher(tmp_path, answers("a").info)
    pusher._transport = SimpleNamespace(transfer=lambda *_, apart: calls.append(apart))
    pusher.push_stale(0), pusher.push_stale(0)
    assert calls == [False, True]


def test_servers_are_resumed_after_an_error(answers):
    server = answers("a")
    push = recipients(server, interrupt="retract")
    with pytest.raises(ZeroDivisionError), push.paused():
        1 / 0  # noqa: B018
    assert server.calls["/continue_generation"] == 1 and push.report.pause_s > 0
    # SGLang would give memory back to the driver within the pause.
    assert server.bodies["/continue_generation"] == {"torch_empty_cache": False}


def test_a_server_that_cannot_be_resumed_has_failed(answers):
    good, bad = answers("good"), answers("bad", "/continue_generation")
    push = recipients(good, bad, interrupt="retract")
    with push.paused():
        pass
    assert push.report.failed == ["bad"]


def test_run_together_repeats_without_the_server_that_failed(answers):
    a, b = answers("a"), answers("b")
    push, seen = recipients(a, b), []

    def action(servers):
        seen.append([s.name for s in servers])
        if b.info in servers:
            raise ServersFailed([ServerError(b.info, "gone")])

    push.run_together(action)
    assert seen == [["a", "b"], ["a"]] and push.servers == [a.info]


@pytest.mark.parametrize("failures", [1, 2])
def test_run_together_repeats_once_if_no_server_is_to_blame(answers, failures):
    server = answers("a")
    push, seen = recipients(server), []

    def action(servers):
        seen.append(servers)
        if len(seen) <= failures:
            raise CollectiveError(f"connection {len(seen)} reset")

    if failures == 1:
        push.run_together(action)
    else:
        with pytest.raises(CollectiveError, match="connection 2 reset"):
            push.run_together(action)
    assert seen == [[server.info]] * 2 and push.report.failed == []


def test_the_cache_is_flushed_only_when_nothing_runs_on_it():
    assert [
        recipients(interrupt=mode).flush_cache for mode in ("in_place", "retract", "abort", "none")
    ] == [False, True, True, True]


def test_a_bucket_is_gathered_while_another_is_sent(answers, tmp_path, monkeypatch):
    server, gathered, sent = answers("a"), [], []

    def buckets(size):
        for number in range(5):
            gathered.append(number)
            yield [("w", torch.full((2,), float(number)))]

    class Group:
        servers = [server.info]

        def send(self, bucket, options):
            assert options["load_format"] == "flattened_bucket" and not options["flush_cache"]
            number = bucket.data.view(torch.float32)[0].item()
            ahead = min(number + 2, 4)
            deadline = time.monotonic() + 20
            while gathered[-1] < ahead:
                assert time.monotonic() < deadline, f"{gathered} while {number} is sent"
                time.sleep(0.01)
            sent.append((number, options["weight_version"]))

    weights = SimpleNamespace(buckets=buckets)
    config = TrainConfig(model=str(tmp_path))
    config.sync.transport = "distributed"
    pusher = WeightPusher(weights, CPU, None, config, tmp_path)
    push = recipients(server, version=7)

    def join(*_: object) -> Group:
        assert gathered == [], "the group is joined first"
        pusher._transport._group = Group()
        return pusher._transport._group

    monkeypatch.setattr("areal_lite.weights.broadcast.WeightGroup", join)
    pusher._transfer(push)
    assert sent == [(0, None), (1, None), (2, None), (3, None), (4, "7")]
    assert server.calls["/end_weight_update"] == server.calls["/continue_generation"] == 1


@pytest.mark.parametrize(("drained", "drain_s"), [(3, 2.5), (0, 0.0)])
def test_the_wait_for_running_requests_is_told_apart(monkeypatch, tmp_path, drained, drain_s):
    clock = [0.0]

    def begin_push(version: int) -> PushTargets:
        clock[0] += 2.5
        return PushTargets([], drained)

    def buckets(size: int):
        clock[0] += 1.0
        yield [("w", torch.ones(1))]

    monkeypatch.setattr("areal_lite.weights.push.steady_time", lambda: clock[0])
    controller = SimpleNamespace(begin_push=begin_push, pushed=lambda version, failed: None)
    config, weights = TrainConfig(model=str(tmp_path)), SimpleNamespace(buckets=buckets)
    pusher = WeightPusher(weights, CPU, controller, config, tmp_path)
    report = pusher.push_all(1)
    pusher.close()
    assert (report.drained, report.drain_s, report.total_s) == (drained, drain_s, 3.5)


@pytest.mark.parametrize("interrupt", ["in_place", "retract"])
def test_weights_in_memory_are_checked_before_any_server_is_paused(answers, tmp_path, interrupt):
    good, bad = answers("good"), answers("bad", "/update_weights_from_disk")
    weights = SimpleNamespace(buckets=lambda size: iter([[("w", torch.ones(2))]]))
    config = TrainConfig(model=str(tmp_path))
    config.sync.transport, config.rollout.interrupt = "memory", interrupt
    pusher = WeightPusher(weights, CPU, None, config, tmp_path)
    push = recipients(good, bad, interrupt=interrupt, version=7)
    pusher._transfer(push)
    pusher.close()
    paused = int(interrupt != "in_place")
    assert good.calls == Counter(
        {"/update_weights_from_disk": 2}
        | ({"/pause_generation": 1, "/continue_generation": 1} if paused else {})
    )
    assert bad.calls == {"/update_weights_from_disk": 1}, "it refused the check, and generates on"
    assert push.report.failed == ["bad"] and push.report.pause_s > 0
    body = good.bodies["/update_weights_from_disk"]
    assert body["load_format"].startswith("areal_lite_activate:") and body["weight_version"] == "7"
    assert body["flush_cache"] == bool(paused), "a flush would break the requests that run on"


def test_servers_that_are_not_paused_take_turns(monkeypatch):
    """The slowest of several servers that are asked at once determines how long they take."""
    clock, calls = [0.0], []

    def post_each(servers, path, body, timeout_s):
        calls.append([server.name for server in servers])
        clock[0] += max({"a": 2.0, "b": 3.0}[server.name] for server in servers)
        return []

    monkeypatch.setattr("areal_lite.weights.recipients.post_each", post_each)
    monkeypatch.setattr("areal_lite.cpu.memory.transport.steady_time", lambda: clock[0])
    servers = [
        ServerInfo(name=name, url="", api_key=None, tensor_parallel=1, pid=1) for name in "ab"
    ]
    push = PushRecipients(servers, PushReport(version=1), SyncConfig())
    take_turns(push, {})
    assert calls == [["a"], ["b"]] and push.report.pause_s == 3.0


def test_weight_folder_touches_nothing_but_its_own(answers, tmp_path):
    model, root = tmp_path / "model", tmp_path / "root"
    model.mkdir(), root.mkdir()
    (model / "config.json").write_text("{}")
    (root / "v0").mkdir(), (root / "venv").mkdir()
    folder = Folder(root, model, tmp_path)
    push = recipients(answers("a"), interrupt="retract")
    first = folder.write([[("w", torch.ones(2))]], 0)
    folder.transfer(push, [[("w", torch.ones(2))], [("u", torch.ones(1))]], apart=False)
    assert not first.exists() and sorted(p.name for p in (first.parent / "v1").iterdir()) == [
        "config.json", "model-00000.safetensors", "model-00001.safetensors",
    ]  # fmt: skip
    folder.close([])
    assert sorted(p.name for p in root.iterdir()) == ["v0", "venv"]


def test_a_trainer_removes_the_weights_of_the_one_that_was_killed_before_it(tmp_path):
    """Each start would otherwise leave a model behind, perhaps in the memory of the machine."""
    model, root = tmp_path / "model", tmp_path / "root"
    model.mkdir()
    (model / "config.json").write_text("{}")
    runs = [Folder(root, model, tmp_path / name) for name in ("run", "run", "other")]
    folders = [folder.write([[("w", torch.ones(2))]], 1).parent for folder in runs]
    assert sorted(root.iterdir()) == sorted(folders[1:])


def test_each_rank_gets_the_pusher_for_its_part_of_the_weights():
    gathered = []
    weights = SimpleNamespace(buckets=lambda size: map(gathered.append, range(3)))
    policy = SimpleNamespace(weights=weights, device=CPU)

    def make(controller: object) -> Pusher:
        config = TrainConfig(model="m")
        return make_pusher(policy, controller, config, Path("r"))

    assert make(None).push_all(1) is None and gathered == [0, 1, 2]
    assert make(None).push_stale(1) is None and gathered == 2 * [0, 1, 2]
    pusher = make(object())
    assert isinstance(pusher, WeightPusher)
    assert pusher.servers == [], "no server has the weights of a trainer that starts"
