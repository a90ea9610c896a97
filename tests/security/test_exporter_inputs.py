"""The exporter answers whatever the files of a run hold, and whoever connects."""

import contextlib
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from areal_lite.servers.registry import ServerInfo, announce_server, announced_servers
from areal_lite.tools.report import exporter as module
from areal_lite.tools.report.exporter import exporter
from tests.security.mutation import mutated
from tests.unit.tools.report.synthetic_run import step_record

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
DEEP = b"[" * 100_000
SERVER = ServerInfo(name="s", url="http://10.0.0.1:80", api_key=None, tensor_parallel=1, pid=1)


@contextlib.contextmanager
def serving(*run_dirs: Path) -> Iterator[int]:
    server = exporter(run_dirs, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(port: int, path: str = "/metrics") -> str:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.status == 200
        return answer.read().decode()


def good_run(run_dir: Path) -> Path:
    run_dir.mkdir()
    (run_dir / CONFIG).write_text("trainer: {steps: 7}\nserver: {args: {enable_metrics: true}}\n")
    (run_dir / METRICS).write_text(json.dumps(step_record(3, logged_at=1.0)) + "\n")
    announce_server(run_dir, SERVER)
    return run_dir


MALFORMED = [
    (METRICS, b"xx\n"),
    (METRICS, b"[]\n"),
    (METRICS, b"5\n"),
    (METRICS, b'{"a": 1}\n'),
    (METRICS, b'{"step": 1, "logged_at": "x"}\n'),
    (METRICS, b'{"step": 1, "logged_at": null}\n'),
    (METRICS, b"\xff\xfe\n"),
    (METRICS, DEEP + b"\n"),
    ("evals.jsonl", b"{\n"),
    (CONFIG, b"a: ["),
    (CONFIG, b"- 1"),
    (CONFIG, b"\xff"),
    (CONFIG, b"trainer: {steps: '${nowhere}'}"),
    (CONFIG, b"trainer: !!python/object/apply:os.system [x]"),
    ("servers/s.json", b"{"),
    ("servers/s.json", b"[]"),
    ("servers/s.json", b'{"name": "s"}'),
    ("servers/s.json", DEEP),
    ("servers/s.json", json.dumps({"name": "../x", "url": "http://a", "pid": 1}).encode()),
    (
        "servers/s.json",
        b'{"name":"s","url":"http://[","api_key":null,"tensor_parallel":1,"pid":1}',
    ),
]


@pytest.mark.parametrize(("name", "content"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_left_out_and_counted(tmp_path, capsys, caplog, name, content) -> None:
    bad, good = good_run(tmp_path / "bad"), good_run(tmp_path / "good")
    (bad / name).write_bytes(content)
    with serving(bad, good) as port:
        for _ in range(3):
            text = get(port)
            json.loads(get(port, "/servers"))
    assert f'areal_lite_run_malformed{{run="{bad}"}} 1.0' in text
    assert f'areal_lite_run_malformed{{run="{good}"}} 0.0' in text
    assert f'areal_lite_step{{run="{good}"}} 3.0' in text
    logged = capsys.readouterr().err.strip().splitlines()
    logged += [record.getMessage() for record in caplog.records]
    assert len(logged) == 1 and str(bad) in logged[0], logged


def test_odd_numbers_and_names(tmp_path) -> None:
    run_dir = good_run(tmp_path / "run")
    line = '{"step":1,"logged_at":1,"z":%s,"n":NaN,"i":-Infinity,"\\ud800":1,"a\\nb":2}\n' % (
        "9" * 400
    )
    (run_dir / METRICS).write_text(line)
    with serving(run_dir) as port:
        text = get(port)
    assert f'areal_lite_n{{run="{run_dir}"}} NaN' in text and "areal_lite_z" not in text


def test_a_malformed_announcement_does_not_end_the_fleet(tmp_path, caplog) -> None:
    announce_server(tmp_path, SERVER)
    (tmp_path / "servers" / "t.json").write_bytes(b"{")
    for _ in range(3):
        assert announced_servers(tmp_path) == [SERVER]
    assert len(caplog.records) == 1 and "t.json is left out" in caplog.text


def test_idle_connections_end_and_are_few(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_CONNECTION_S", 0.5)
    run_dir = good_run(tmp_path / "run")
    before = threading.active_count()
    with serving(run_dir) as port:
        started = time.monotonic()
        strangers = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(100)]
        with contextlib.suppress(OSError):
            for stranger in strangers:
                stranger.sendall(b"GET /metrics HT")
        time.sleep(0.2)
        assert threading.active_count() - before <= 1 + module._MAX_CONNECTIONS
        time.sleep(0.8)
        assert "areal_lite_step" in get(port)
        assert time.monotonic() - started < 8
        for stranger in strangers:
            stranger.close()


def test_a_drip_of_headers_ends(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_CONNECTION_S", 0.5)
    with serving(tmp_path) as port, socket.create_connection(("127.0.0.1", port), 5) as stranger:
        with pytest.raises(OSError):
            for _ in range(200):
                stranger.sendall(b"x")
                time.sleep(0.02)


WORDS = [b"null", b"[", b"{", b'"', b"\n", b": ", b"&a", b"*a", b"!!x ", b"${a}", b"9" * 999]


def fuzz(folder: Path, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    run_dir = good_run(folder)
    honest = {name: (run_dir / name).read_bytes() for name in (METRICS, CONFIG, "servers/s.json")}
    with serving(run_dir) as port:
        for _ in range(cases):
            name = rng.choice([*honest])
            (run_dir / name).write_bytes(mutated(rng, honest[name], WORDS))
            started = time.monotonic()
            assert "areal_lite_run_malformed" in get(port)
            json.loads(get(port, "/servers"))
            assert time.monotonic() - started < 5
            (run_dir / name).write_bytes(honest[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20


def test_mutated_files(tmp_path) -> None:
    fuzz(tmp_path / "run", 150, seed=1)


@pytest.mark.slow
def test_many_mutated_files(tmp_path) -> None:
    for seed in range(2, 22):
        fuzz(tmp_path / str(seed), 1_000, seed)
