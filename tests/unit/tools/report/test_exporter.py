"""The exporter: Prometheus sees the newest complete step of a run and its current servers."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from areal_lite.config import LoggerConfig, save_config
from areal_lite.run_dir.metrics import MetricsLog, read_metrics
from areal_lite.servers.registry import ServerInfo, announce_server
from areal_lite.system.files import write_json
from areal_lite.tools.report.exporter import FACTS, RunCollector, exporter, targets
from tests.unit.tools.report.synthetic_run import T0, config_of, hand_made, step_record

NOW = T0 + 100


def scrape(*run_dirs: Path) -> dict[str, dict[str, float]]:
    """Return name without prefix -> run -> value."""
    registry = CollectorRegistry()
    registry.register(RunCollector(run_dirs, lambda: NOW))
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge" and family.name not in found, "a name may come once only"
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("areal_lite_"), {})[sample.labels["run"]] = (
                sample.value
            )
    return found


def of(run_dir: Path) -> dict[str, float]:
    return {name: values[str(run_dir)] for name, values in scrape(run_dir).items()}


def log_step(run_dir: Path, step: int, **values) -> None:
    log = MetricsLog(run_dir, LoggerConfig(), {})
    log.log(step_record(step, **values))
    log.close()


def server(number: int, host: str = "10.1.2.3") -> ServerInfo:
    return ServerInfo(
        name=f"server-{number}",
        url=f"http://{host}:{20000 + number}",
        api_key="secret",
        tensor_parallel=1,
        pid=1,
    )


def test_the_newest_step_number_by_number(tmp_path):
    hand_made(tmp_path)
    found, newest = of(tmp_path), read_metrics(tmp_path)[-1]
    assert newest["step"] == 1 and {name: found[name] for name in newest} == newest
    assert {name for name in found if name.startswith("eval_")} == {
        "eval_version",
        "eval_greedy",
        "eval_sampled",
        "eval_problems",
    }
    assert found["eval_sampled"] == 0.7
    assert set(found) == {
        *newest,
        *(f"run_{fact}" for fact in FACTS),
        *(name for name in found if name.startswith("eval_")),
    }


def test_a_half_written_line_is_not_a_step_yet(tmp_path):
    hand_made(tmp_path, killed=True)
    assert not (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    found = of(tmp_path)
    assert found["step"] == 0 and found["reward_mean"] == 0.5


def test_null_and_lists_are_left_out_and_odd_names_made_to_fit(tmp_path):
    values = {"pause_s": float("nan"), "failed": ["server-0"], "tokens_by_staleness": [1.0, 2.0]}
    log_step(
        tmp_path,
        3,
        **values,
        **{"filtered_too easy!": 4, "filtered_too-easy!": 5, "filtered_größe": 6, "run_servers": 7},
    )
    found = of(tmp_path)
    assert not set(values) & set(found)
    assert found["filtered_too_easy_"] == 4, "the first of two keys with one name counts"
    assert found["filtered_gr__e"] == 6
    assert found["run_servers"] == 0, "a fact is not displaced by a key of a step"


def test_facts(tmp_path):
    run_dir = tmp_path / "run"
    assert scrape(run_dir) == {}, "the directory does not exist yet"
    run_dir.mkdir()
    assert of(run_dir) == {"run_ended": 0, "run_servers": 0, "run_malformed": 0}
    save_config(config_of(run_dir, steps=7, max_staleness=2), run_dir)
    for number in range(3):
        announce_server(run_dir, server(number))
    assert of(run_dir) == {
        "run_ended": 0,
        "run_servers": 3,
        "run_steps_planned": 7,
        "run_malformed": 0,
    }
    (run_dir / "servers" / "server-0.json").unlink()
    (run_dir / "servers" / "server-1.unhealthy").write_text("{}")
    log_step(run_dir, 1, logged_at=NOW - 30)
    write_json(run_dir / "summary.json", {})
    found = of(run_dir)
    assert (found["run_ended"], found["run_servers"], found["run_seconds_since_step"]) == (1, 2, 30)


def test_several_runs_side_by_side(tmp_path):
    for name, step in (("a", 5), ("b", 9)):
        (tmp_path / name).mkdir()
        log_step(tmp_path / name, step)
    assert scrape(tmp_path / "a", tmp_path / "b", tmp_path / "later")["step"] == {
        str(tmp_path / "a"): 5,
        str(tmp_path / "b"): 9,
    }


@contextmanager
def serving(*run_dirs: Path) -> Iterator[int]:
    """Run an exporter and yield its port."""
    server = exporter(run_dirs, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_http_on_loopback_alone(tmp_path):
    run_dir = tmp_path / "run"
    with serving(run_dir) as port:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert (
                answer.status == 200
                and answer.headers["Content-Type"].startswith("text/plain")
                and parsed(answer.read().decode()) == {}
            )
        run_dir.mkdir()
        log_step(run_dir, 4)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert parsed(answer.read().decode())["step"] == {str(run_dir): 4}
        # Another address of this machine: a server that listens on all of them would answer there.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_the_host_is_loopback_unless_another_is_named(tmp_path, monkeypatch):
    bound = []
    monkeypatch.setattr(
        "areal_lite.tools.report.exporter.exporter",
        lambda run_dirs, host, port: bound.append((run_dirs, host, port)) or Interrupted(),
    )
    from areal_lite.tools.report.exporter import main

    for arguments in (["a", "b", "a"], ["a", "--host", "node", "--port", "5"]):
        monkeypatch.setattr("sys.argv", ["exporter", *arguments])
        assert main() == 130
    assert bound == [([Path("a"), Path("b")], "127.0.0.1", 9108), ([Path("a")], "node", 5)]


class Interrupted:
    server_address, server_port = ("127.0.0.1", 1), 1

    def serve_forever(self) -> None:
        raise KeyboardInterrupt


def test_servers_with_metrics_are_targets_and_their_keys_stay_here(tmp_path):
    runs = [tmp_path / "with", tmp_path / "without"]
    for run_dir in runs:
        config = config_of(run_dir, steps=1, max_staleness=1)
        config.server.args = {"enable_metrics": True} if run_dir.name == "with" else {}
        save_config(config, run_dir)
        announce_server(run_dir, server(0))
    announce_server(runs[0], server(1, "127.0.0.1"))
    labels = {"run": str(runs[0])}
    expected = [
        {"targets": ["10.1.2.3:20000"], "labels": {**labels, "server": "server-0"}},
        {"targets": ["127.0.0.1:20001"], "labels": {**labels, "server": "server-1"}},
    ]
    assert targets([*runs, tmp_path / "later"]) == expected
    with serving(*runs) as port, urlopen(f"http://127.0.0.1:{port}/servers", timeout=5) as answer:
        assert (
            answer.headers["Content-Type"] == "application/json" and json.load(answer) == expected
        )
