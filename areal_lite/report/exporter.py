"""Prometheus metrics of runs.

    python -m areal_lite.report.exporter RUN_DIR … [--host 127.0.0.1] [--port 9108]

/metrics has gauges with the label `run`, the directory as it was given:

* areal_lite_<key>: each number in the newest complete line of metrics.jsonl. Null and lists are
  left out.
* areal_lite_eval_<key>: each number in the newest complete line of evals.jsonl.
* areal_lite_run_<fact>: the state of the run, see FACTS.

/servers lists the announced servers of runs with server.args.enable_metrics=true, for Prometheus'
http_sd_configs. It contains no keys, because SGLang's /metrics asks for none.

The exporter reads the run directories at each request and writes nothing. It may start before a
run, outlive it, and end at any time. A directory that does not exist yet has no metrics. There is
no password, so the exporter binds to loopback unless another host is named.
"""

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
from areal_lite.run_dir.paths import CONFIG_FILE, SUMMARY_FILE
from areal_lite.servers.registry import announced_servers
from areal_lite.system.network import LOOPBACK, NODE, listen_address

FACTS = {
    "seconds_since_step": "seconds since the newest training step was logged",
    "steps_planned": "trainer.steps",
    "ended": "1 if summary.json exists, otherwise 0",
    "servers": "number of announced servers",
}


class RunCollector(Collector):
    """The gauges of several runs."""

    def __init__(self, run_dirs: Iterable[Path], clock: Callable[[], float] = time.time):
        """Remember the directories. `clock` returns seconds since 1970, like `logged_at`."""
        self._run_dirs = list(run_dirs)
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read all run directories that exist."""
        families: dict[str, GaugeMetricFamily] = {}
        for run_dir in filter(Path.is_dir, self._run_dirs):
            for name, (value, text) in _gauges(run_dir, self._clock()).items():
                family = families.setdefault(name, GaugeMetricFamily(name, text, labels=["run"]))
                family.add_metric([str(run_dir)], value)
        yield from families.values()


def _gauges(run_dir: Path, now: float) -> dict[str, tuple[float, str]]:
    """Return name -> (value, description).

    Two keys can yield the same name. The first one counts: Prometheus would refuse both.
    """
    step = newest_event(run_dir, "metrics") or {}
    facts = {
        "seconds_since_step": now - step["logged_at"] if step else None,
        "steps_planned": OmegaConf.select(_config(run_dir), "trainer.steps"),
        "ended": (run_dir / SUMMARY_FILE).exists(),
        "servers": len(announced_servers(run_dir)),
    }
    sources = (
        ("run_", facts, FACTS),
        ("", step, STEP_KEYS),
        ("eval_", newest_event(run_dir, "evals") or {}, {}),
    )
    gauges: dict[str, tuple[float, str]] = {}
    for prefix, values, texts in sources:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                gauges.setdefault(metric_name(prefix + key), (float(value), texts.get(key, key)))
    return gauges


def metric_name(key: str) -> str:
    """Return a Prometheus name for a key of a step.

    Keys can hold any character: those of filters end with a reason that a user wrote.
    """
    return "areal_lite_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)


def targets(run_dirs: Iterable[Path]) -> list[dict[str, Any]]:
    """List the servers that have metrics: [{targets: [host:port], labels: {run, server}}]."""
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
    path = run_dir / CONFIG_FILE
    config = OmegaConf.load(path) if path.exists() else OmegaConf.create()
    assert isinstance(config, DictConfig)
    return config


def exporter(run_dirs: Sequence[Path], host: str, port: int) -> WSGIServer:
    """Return a listening server; call its `serve_forever`.

    Raises OSError when it cannot listen.

    Args:
        run_dirs: the run directories; they may appear later.
        host: an address, or NODE for the address of this machine.
        port: a port; 0 picks a free one, which is the server's `server_port`.
    """
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
    # An open connection of a client must not keep the process alive.
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a scrape comes every few seconds. Errors are still printed."""


def main() -> int:
    """Serve until interrupted and return the exit status."""
    args = _arguments()
    run_dirs = list(dict.fromkeys(args.run_dirs))
    try:
        server = exporter(run_dirs, args.host, args.port)
    except OSError as error:
        print(
            f"cannot listen on {args.host}:{args.port} ({error.strerror}): "
            "choose another --host or --port",
            file=sys.stderr,
        )
        return 1
    names = [f"{folder}{'' if folder.is_dir() else ' (not there yet)'}" for folder in run_dirs]
    url = f"http://{server.server_address[0]}:{server.server_port}/metrics"
    print(f"{url}: {', '.join(names)}", file=sys.stderr)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 130
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m areal_lite.report.exporter", description="Metrics of runs, for Prometheus."
    )
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="may be made later"
    )
    parser.add_argument(
        "--host",
        default=LOOPBACK[0],
        help=f"an address, or `{NODE}` for this machine's own; there is no password "
        "(default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=9108, help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
