"""A push among servers of which one misbehaves: exactly that one leaves, and whoever was paused goes on."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from areal_lite.servers.control import ServerError, ServersFailed, post, post_each
from areal_lite.servers.registry import ServerInfo
from areal_lite.weights.disk import WeightFolder
from areal_lite.weights.push import PushReport, _Members, _Paused, _with_last


class Answers:
    """An HTTP server on loopback that counts calls by path and refuses those in `bad`."""

    def __init__(self, name: str, bad: tuple[str, ...] = ()):
        self.calls: Counter[str] = Counter()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.calls[self.path] += 1
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


def members(*servers: Answers) -> _Members:
    return _Members([s.info for s in servers], PushReport(version=1), timeout_s=5)


def test_the_one_that_fails_leaves_and_the_others_are_not_asked_twice(answers):
    """A second /begin_weight_update would be refused by a server whose session is open."""
    good, bad = answers("good"), answers("bad", "/begin_weight_update")
    group = members(good, bad)
    with _Paused(group, "in_place", group.report, 5):
        group.post("/begin_weight_update", {})
    assert group.servers == [good.info] and group.report.failed == ["bad"]
    assert good.calls == {
        "/pause_generation": 1,
        "/begin_weight_update": 1,
        "/continue_generation": 1,
    }
    assert bad.calls["/continue_generation"] == 0, "its weights may be half new: it must not go on"


def test_servers_are_resumed_after_an_error(answers):
    server = answers("a")
    group = members(server)
    with pytest.raises(ZeroDivisionError), _Paused(group, "retract", group.report, 5):
        1 / 0  # noqa: B018
    assert server.calls["/continue_generation"] == 1 and group.report.pause_s > 0


def test_one_that_cannot_be_resumed_has_failed(answers):
    good, bad = answers("good"), answers("bad", "/continue_generation")
    group = members(good, bad)
    with _Paused(group, "retract", group.report, 5):
        pass
    assert group.report.failed == ["bad"]


def test_each_repeats_without_the_one_that_failed(answers):
    a, b = answers("a"), answers("b")
    group, seen = members(a, b), []

    def action(servers):
        seen.append([s.name for s in servers])
        if b.info in servers:
            raise ServersFailed([ServerError(b.info, "gone")])

    group.each(action)
    assert seen == [["a", "b"], ["a"]] and group.servers == [a.info]


def test_post_ignores_proxies_and_reports_a_dead_server(answers, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = answers("a")
    assert post(server.info, "/x", {}, 5)["success"] is True
    server.close()
    (error,) = post_each([server.info], "/x", {}, 5)
    assert "server a" in str(error)


def test_flush_only_when_nothing_runs_on_the_old_cache():
    assert [
        _Paused(None, mode, PushReport(version=1), 5).flush_cache
        for mode in ("in_place", "retract", "abort", "none")
    ] == [False, True, True, True]


def test_last_bucket_is_marked():
    assert [last for _, last in _with_last([[("a", None)], [("b", None)], [("c", None)]])] == [
        False,
        False,
        True,
    ]


def test_weight_folder_touches_nothing_but_its_own(tmp_path):
    model, root = tmp_path / "model", tmp_path / "root"
    model.mkdir(), root.mkdir()
    (model / "config.json").write_text("{}")
    (root / "v0").mkdir(), (root / "venv").mkdir()
    folder = WeightFolder(root, model)
    first = folder.write([[("w", torch.ones(2))]], 1)
    second = folder.write([[("w", torch.ones(2))], [("u", torch.ones(1))]], 2)
    folder.keep_only(second)
    assert not first.exists() and sorted(p.name for p in second.iterdir()) == [
        "config.json", "model-00000.safetensors", "model-00001.safetensors",
    ]  # fmt: skip
    folder.close()
    assert sorted(p.name for p in root.iterdir()) == ["v0", "venv"]
