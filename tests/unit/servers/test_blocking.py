"""Calls to servers from threads: what is an error, and what the error says about the server."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from areal_lite.servers.blocking import post, post_each, start_reaching
from areal_lite.servers.client import ServerFailed, ServerRefused, ServerUnreachable
from areal_lite.servers.registry import ServerInfo

ANSWERS = {
    "/fine": (200, json.dumps({"success": True, "n": 1})),
    "/empty": (200, ""),
    "/text": (200, "no JSON"),
    "/no": (200, json.dumps({"success": False, "message": "not now"})),
    "/odd": (404, "no such thing"),
    "/broken": (503, "out of order"),
    "/health": (503, "starting"),
}


class Handler(BaseHTTPRequestHandler):
    headers_seen: list[str | None] = []

    def do_GET(self) -> None:
        self._answer(*ANSWERS[self.path])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Handler.headers_seen.append(self.headers["Authorization"])
        if self.path == "/slow":
            time.sleep(1)
        self._answer(*ANSWERS.get(self.path, (200, "{}")))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield ServerInfo(
        name="a",
        url=f"http://127.0.0.1:{http.server_port}",
        api_key="key",
        tensor_parallel=1,
        pid=1,
    )
    http.shutdown()
    http.server_close()


def test_answers_are_decoded(server):
    assert post(server, "/fine", {}, 5) == {"success": True, "n": 1}
    assert post(server, "/empty", {}, 5) is None
    assert Handler.headers_seen[-1] == "Bearer key"


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/no", ServerRefused, "server a .*: /no: not now"),
        ("/text", ServerFailed, "/text: not the expected answer: .*'no JSON'"),
        ("/odd", ServerRefused, "/odd answered 404: no such thing"),
        ("/broken", ServerFailed, "/broken answered 503: out of order"),
        ("/slow", ServerUnreachable, "no answer to /slow within 0.3 s"),
    ],
)
def test_an_error_says_whether_the_server_is_to_blame(server, path, error, message):
    with pytest.raises(error, match=message) as raised:
        post(server, path, {}, 0.3)
    assert type(raised.value) is error and raised.value.server == server


def test_post_ignores_proxies_and_reports_a_dead_server(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    dead = ServerInfo(name="b", url="http://127.0.0.1:9", api_key=None, tensor_parallel=1, pid=1)
    (error,) = post_each([server, dead], "/fine", {}, 5)
    assert isinstance(error, ServerUnreachable) and error.server == dead
    assert start_reaching(server, 5).result(), "any status is an answer"
    assert not start_reaching(dead, 5).result()


def test_all_servers_are_called_at_once(server):
    started = time.monotonic()
    assert post_each([server] * 8, "/slow", {}, 5) == []
    assert time.monotonic() - started < 4


def test_a_call_that_hangs_does_not_keep_the_process_alive():
    code = (
        "import socket\n"
        "from areal_lite.servers.blocking import start_post\n"
        "from areal_lite.servers.registry import ServerInfo\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "url = f'http://127.0.0.1:{listener.getsockname()[1]}'\n"
        "server = ServerInfo(name='a', url=url, api_key=None, tensor_parallel=1, pid=1)\n"
        "start_post(server, '/x', {}, 600)\n"
        "listener.accept()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=30, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_a_forked_process_makes_its_own_connections(server):
    code = (
        "import os, sys\n"
        "from areal_lite.servers.blocking import post\n"
        "from areal_lite.servers.registry import ServerInfo\n"
        "server = ServerInfo(\n"
        "    name='a', url=sys.argv[1], api_key=None, tensor_parallel=1, pid=1\n"
        ")\n"
        "assert post(server, '/fine', {}, 5)['n'] == 1\n"
        "child = os.fork()\n"
        "assert post(server, '/fine', {}, 5)['n'] == 1\n"
        "sys.exit(os.waitpid(child, 0)[1]) if child else os._exit(0)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, server.url]
    done = subprocess.run(command, timeout=30, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
