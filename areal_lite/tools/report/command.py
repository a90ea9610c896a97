"""The commands that show runs: report, compare, inspect, follow. Each returns an exit status."""

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer, make_server

from rich.console import Console

from areal_lite.run_dir.paths import EVALS_FILE, METRICS_FILE, STORE_FILE, SUMMARY_FILE
from areal_lite.system.files import write_atomically
from areal_lite.system.network import LOOPBACK
from areal_lite.tools.commands import ReportConfig, existing_run, no_traceback
from areal_lite.tools.report.page import compare_page, run_page, write_page
from areal_lite.tools.report.rollouts import show_matching

_WATCHED = (METRICS_FILE, EVALS_FILE, SUMMARY_FILE, STORE_FILE, f"{STORE_FILE}-wal")
# A page is built again at most so often: seconds, and a multiple of the time that it takes.
_LEAST_S = 2.0
_PATIENCE = 4.0
_LONGEST_S = 600.0  # that a page may take to be built
_HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Cache-Control", "no-cache"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)


@no_traceback()
def report(config: ReportConfig) -> int:
    """Write report.html and report.png of a run, or one page that compares several."""
    if len(config.runs) > 1:
        out = Path(config.out or "compare.html")
        write_atomically(out, compare_page([existing_run(run) for run in config.runs]))
        print(out)
        return 0
    from areal_lite.tools.report.figure import write_report  # matplotlib is slow to import

    run_dir = _only_run(config)
    print(write_page(run_dir))
    print(write_report(run_dir))
    return 0


@no_traceback()
def inspect(config: ReportConfig) -> int:
    """Print trajectories."""
    console = Console(highlight=False, soft_wrap=True)
    for part in show_matching(_only_run(config), config):
        console.print(part)
    return 0


@no_traceback()
def follow(config: ReportConfig) -> int:
    """Serve the page of a run until the user interrupts it."""
    run_dir = _only_run(config)
    try:
        server = page_server(run_dir, config.port)
    except OSError as error:
        raise ValueError(f"port={config.port}: cannot listen there ({error.strerror})") from error
    host, port = server.server_address[:2]
    print(f"http://{host}:{port}/ shows {run_dir} until you press Ctrl-C", file=sys.stderr)
    server.serve_forever()
    return 0


def _only_run(config: ReportConfig) -> Path:
    """Return the run directory. Raises ValueError unless there is one."""
    if len(config.runs) != 1:
        raise ValueError(f"runs: name one run directory, not {len(config.runs)}")
    return existing_run(config.runs[0])


class LivePage:
    """The page of a run, built again when the run's files have changed."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._seen: list[tuple[int, int] | None] = []
        self._next_at = 0.0
        self._page = b""
        self.tag = ""

    def read(self) -> tuple[bytes, str]:
        """Return the page and its entity tag. Raises ValueError if there is no run."""
        with self._lock:
            now = time.monotonic()
            seen = [_stamp(self._run_dir / name) for name in _WATCHED]
            if not self._page or (seen != self._seen and now >= self._next_at):
                self._page = run_page(self._run_dir, follow=True).encode()
                self.tag = f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'
                self._seen = seen
                done = time.monotonic()
                self._next_at = done + max(_LEAST_S, _PATIENCE * (done - now))
            return self._page, self.tag


def page_server(run_dir: Path, port: int) -> WSGIServer:
    """Return a listening server of the page; call its `serve_forever`.

    Raises OSError if it cannot listen on `port` (0: any), and ValueError if `run_dir` has no run.
    """
    from areal_lite.tools.report.exporter import LimitedServer, QuietHandler  # slow to import

    page = LivePage(run_dir)
    page.read()

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if not is_loopback(environ.get("HTTP_HOST", ""), server.server_port):
            start_response("403 Forbidden", [])
            return [b"open this page by its loopback address"]
        if environ["PATH_INFO"] != "/":
            start_response("404 Not Found", [])
            return []
        body, tag = page.read()
        fresh = environ.get("HTTP_IF_NONE_MATCH") == tag
        start_response("304 Not Modified" if fresh else "200 OK", [("ETag", tag), *_HEADERS])
        return [] if fresh else [body]

    server = make_server(LOOPBACK[0], port, app, LimitedServer, QuietHandler)
    server.longest_s = _LONGEST_S
    return server


def is_loopback(host: str, port: int) -> bool:
    """Return whether a Host header names this machine's loopback address and `port`."""
    return host in {f"{'[' + name + ']' if ':' in name else name}:{port}" for name in LOOPBACK}


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size
