"""Prometheus metrics of runs.

    python -m areal_lite.tools.report.exporter RUN_DIR … [--host 127.0.0.1] [--port 9108]

docs/running.md (A dashboard) says what it serves. Run directories are read at each request, and may
appear at any time. There is no password, so the exporter binds to loopback unless another host is
named. Connections are few, and end after some seconds.
"""

import argparse
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from areal_lite.config import stored_settings, value_of
from areal_lite.run_dir.metrics import read_events
from areal_lite.run_dir.paths import CONFIG_FILE, SUMMARY_FILE
from areal_lite.servers.registry import announced_servers, announcements
from areal_lite.system.network import LOOPBACK, NODE, listen_address
from areal_lite.system.processes import visible
from areal_lite.tools.metric_table import MEANINGS

_MAX_CONNECTIONS = 32
_MAX_CONNECTION_S = 10.0
FACTS = {
    "seconds_since_step": "seconds since the newest training step was logged",
    "steps_planned": "trainer.steps",
    "ended": "1 if summary.json exists, otherwise 0",
    "servers": "number of announced servers",
    "malformed": "number of files that cannot be read",
}
T = TypeVar("T")


class RunCollector(Collector):
    """The gauges of several runs. `clock` returns seconds since 1970, like `logged_at`."""

    def __init__(self, run_dirs: Iterable[Path], clock: Callable[[], float] = time.time):
        self._run_dirs = list(run_dirs)
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read all run directories that exist."""
        families: dict[str, GaugeMetricFamily] = {}
        for run_dir in filter(Path.is_dir, self._run_dirs):
            for name, (value, text) in _gauges(run_dir, self._clock()).items():
                family = families.setdefault(name, GaugeMetricFamily(name, text, labels=["run"]))
                family.add_metric([_printable(str(run_dir))], value)
        yield from families.values()


def _gauges(run_dir: Path, now: float) -> dict[str, tuple[float, str]]:
    """Return name -> (value, description).

    Two keys can yield the same name. The first one counts: Prometheus would refuse both.
    """
    step = _readable(run_dir, partial(_newest, name="metrics"))
    evaluation = _readable(run_dir, partial(_newest, name="evals"))
    settings = _readable(run_dir, _settings)
    servers = announced_servers(run_dir)
    facts = {
        "seconds_since_step": now - step["logged_at"] if step else None,
        "steps_planned": settings and settings["trainer.steps"],
        "ended": (run_dir / SUMMARY_FILE).exists(),
        "servers": len(servers),
        "malformed": [step, evaluation, settings].count(None)
        + max(0, len(announcements(run_dir)) - len(servers)),
    }
    sources: list[tuple[str, dict[str, Any] | None, dict[str, str]]] = [
        ("run_", facts, FACTS),
        ("", step, MEANINGS),
        ("eval_", evaluation, {}),
    ]
    gauges: dict[str, tuple[float, str]] = {}
    for prefix, values, texts in sources:
        for key, value in (values or {}).items():
            with suppress(OverflowError):  # an integer that no float can hold
                if isinstance(value, (int, float)):
                    # A filter's key ends with a reason that a user wrote.
                    name = "areal_lite_" + re.sub(r"[^a-zA-Z0-9_]", "_", prefix + key)
                    gauges.setdefault(name, (float(value), _printable(texts.get(key, key))))
    return gauges


def _newest(run_dir: Path, name: str) -> dict[str, Any]:
    """Return the last record of `<run_dir>/<name>.jsonl`; {} without one."""
    (record,) = read_events(run_dir, name, newest=1) or [{}]
    if name == "metrics" and record and not isinstance(record.get("logged_at"), (int, float)):
        raise ValueError("the newest step lacks logged_at")
    return record


def _settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings that the exporter uses, None where they are not set."""
    config = stored_settings(run_dir) if (run_dir / CONFIG_FILE).exists() else {}
    keys = {"trainer.steps": int, "server.args.enable_metrics": bool}
    found = {key: value_of(config, key) for key in keys}
    if wrong := [key for key in keys if not isinstance(found[key], keys[key] | None)]:
        raise ValueError(f"{CONFIG_FILE}: {wrong[0]} is of another kind")
    return found


def _readable(run_dir: Path, read: Callable[[Path], T]) -> T | None:
    """Return `read(run_dir)`, or None if it raises, which is logged once for each error."""
    try:
        return read(run_dir)
    except Exception as error:  # files may hold anything, and YAML alone raises many classes
        _log_once(run_dir, " ".join(f"{type(error).__name__}: {error}".split())[:300])
        return None


@lru_cache(maxsize=1024)
def _log_once(run_dir: Path, error: str) -> None:
    print(visible(f"{run_dir}: left out: {error}"), file=sys.stderr)


def _printable(text: str) -> str:
    """Replace half surrogate pairs, which have no encoding."""
    return text.encode(errors="replace").decode()


def targets(run_dirs: Iterable[Path]) -> list[dict[str, Any]]:
    """List the servers that have metrics: [{targets: [host:port], labels: {run, server}}]."""
    return [
        {
            "targets": [urlsplit(server.url).netloc],
            "labels": {"run": _printable(str(run_dir)), "server": server.name},
        }
        for run_dir in run_dirs
        if (settings := _readable(run_dir, _settings)) and settings["server.args.enable_metrics"]
        for server in announced_servers(run_dir)
    ]


def exporter(run_dirs: Sequence[Path], host: str, port: int) -> WSGIServer:
    """Return a listening server; call its `serve_forever`. Raises OSError when it cannot listen.

    `host` is an address, or NODE for the address of this machine. Port 0 picks a free one.
    """
    registry = CollectorRegistry()
    registry.register(RunCollector(run_dirs))
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/servers":
            return metrics(environ, start_response)
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(targets(run_dirs)).encode()]

    return make_server(listen_address(host), port, app, LimitedServer, QuietHandler)


class LimitedServer(ThreadingWSGIServer):
    """Serves each connection in a thread; their number and their time are limited."""

    longest_s: float | None = None  # of a connection; None: _MAX_CONNECTION_S
    request_queue_size = 128

    def __init__(self, *args: Any):
        self._opened_at: dict[Any, float] = {}
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._opened_at) >= _MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._opened_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._opened_at.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that are open for too long. `serve_forever` calls it all the time."""
        for request, opened_at in list(self._opened_at.items()):
            if time.monotonic() - opened_at > (self.longest_s or _MAX_CONNECTION_S):
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a request comes every few seconds. Errors are still printed."""


def main() -> int:
    """Serve until interrupted and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_lite.tools.report.exporter",
        description="Metrics of runs, for Prometheus.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="may appear later"
    )
    host_help = f"an address, or `{NODE}` for this machine's own; there is no password"
    parser.add_argument("--host", default=LOOPBACK[0], help=host_help)
    parser.add_argument("--port", type=int, default=9108, help="0: any free one")
    args = parser.parse_args()
    run_dirs = list(dict.fromkeys(args.run_dirs))
    try:
        server = exporter(run_dirs, args.host, args.port)
    except OSError as error:
        at = f"{args.host}:{args.port} ({error.strerror})"
        print(f"cannot listen on {at}: choose another --host or --port", file=sys.stderr)
        return 1
    names = [f"{folder}{'' if folder.is_dir() else ' (not there yet)'}" for folder in run_dirs]
    url = f"http://{server.server_address[0]}:{server.server_port}/metrics"
    print(f"{url}: {', '.join(names)}", file=sys.stderr)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
