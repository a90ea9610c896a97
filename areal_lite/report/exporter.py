"""What runs write down, for Prometheus: `python -m areal_lite.report.exporter RUN_DIR … [--host 127.0.0.1] [--port 9108]`.

It only reads run directories: it may start before a run, outlive it, and end at any time. One that is not there yet has no metrics.

    /metrics   gauges with the label `run`, the directory as it was given:
               areal_lite_<key>        each number of the newest complete line of metrics.jsonl (null and lists are left out)
               areal_lite_eval_<key>   the same of evals.jsonl
               areal_lite_run_<fact>   FACTS, which are true of a run at any time
    /servers   for Prometheus' http_sd_configs: the servers that are announced, of runs with server.args.enable_metrics=true. No keys:
               SGLang's /metrics asks for none.

Everything is read at the time of the request. Whoever reaches the port may read: so loopback is bound, unless another host is named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from omegaconf import DictConfig, OmegaConf
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from areal_lite.run_dir.metrics import STEP_KEYS, newest_event
from areal_lite.servers.registry import announced_servers
from areal_lite.system.network import LOOPBACK, NODE, listen_address

FACTS = {
    "seconds_since_step": "seconds since the newest training step was logged",
    "steps_planned": "trainer.steps",
    "ended": "1 if summary.json is there, otherwise 0",
    "servers": "servers that are announced",
}


class RunCollector(Collector):
    """The gauges of several runs, read anew at each `collect`."""

    def __init__(self, run_dirs: Iterable[Path], clock: Callable[[], float] = time.time):
        """`clock`: seconds since 1970, as in `logged_at`."""
        self._run_dirs, self._clock = list(run_dirs), clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for run_dir in filter(Path.is_dir, self._run_dirs):
            for name, (value, words) in _gauges(run_dir, self._clock()).items():
                family = families.setdefault(name, GaugeMetricFamily(name, words, labels=["run"]))
                family.add_metric([str(run_dir)], value)
        yield from families.values()


def _gauges(run_dir: Path, now: float) -> dict[str, tuple[float, str]]:
    """By name: value and what it is. Of two keys that make the same name the first counts: Prometheus would refuse both."""
    step = newest_event(run_dir, "metrics") or {}
    facts = {
        "seconds_since_step": now - step["logged_at"] if step else None,
        "steps_planned": OmegaConf.select(_config(run_dir), "trainer.steps"),
        "ended": (run_dir / "summary.json").exists(),
        "servers": len(announced_servers(run_dir)),
    }
    parts = (
        ("run_", facts, FACTS),
        ("", step, STEP_KEYS),
        ("eval_", newest_event(run_dir, "evals") or {}, {}),
    )
    gauges: dict[str, tuple[float, str]] = {}
    for prefix, values, words in parts:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                gauges.setdefault(metric_name(prefix + key), (float(value), words.get(key, key)))
    return gauges


def metric_name(key: str) -> str:
    """The key of a step as Prometheus can name it: reasons of filters, for one, are anyone's words."""
    return "areal_lite_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)


def targets(run_dirs: Iterable[Path]) -> list[dict[str, Any]]:
    """[{targets: [host:port], labels: {run, server}}] of the servers that have metrics."""
    return [
        {
            "targets": [urlsplit(server.url).netloc],
            "labels": {"run": str(run_dir), "server": server.name},
        }
        for run_dir in run_dirs
        if OmegaConf.select(_config(run_dir), "server.args.enable_metrics")
        for server in announced_servers(run_dir)
    ]


def _config(run_dir: Path) -> DictConfig:
    path = run_dir / "config.yaml"
    return OmegaConf.load(path) if path.exists() else OmegaConf.create()


def exporter(run_dirs: Sequence[Path], host: str, port: int) -> WSGIServer:
    """A server that listens, for `serve_forever`. OSError when it cannot. Port 0: any, in `server_port`."""
    registry = CollectorRegistry()
    registry.register(RunCollector(run_dirs))
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/servers":
            return metrics(environ, start_response)
        body = json.dumps(targets(run_dirs)).encode()
        start_response("200 OK", [("Content-Type", "application/json")])
        return [body]

    return make_server(listen_address(host), port, app, _Server, _Quiet)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a client that keeps its connection open does not keep us


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is nothing to write home about; errors are still printed."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m areal_lite.report.exporter", description="Metrics of runs, for Prometheus."
    )
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="may be made later"
    )
    parser.add_argument(
        "--host",
        default=LOOPBACK[0],
        help=f"an address, or {NODE}: this machine's own; there is no password (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=9108)
    args = parser.parse_args()
    run_dirs = list(dict.fromkeys(args.run_dirs))
    try:
        server = exporter(run_dirs, args.host, args.port)
    except OSError as error:
        print(
            f"cannot listen on {args.host}:{args.port} ({error.strerror}): choose another --host or --port",
            file=sys.stderr,
        )
        return 1
    names = ", ".join(
        f"{run_dir}{'' if run_dir.is_dir() else ' (not there yet)'}" for run_dir in run_dirs
    )
    print(
        f"http://{server.server_address[0]}:{server.server_port}/metrics: {names}", file=sys.stderr
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
