"""Run `areal-lite serve`: a checkpoint behind SGLang's own OpenAI endpoint, until Ctrl-C.

With `follow=true` the server loads each newer checkpoint of a run. Answers in progress end before,
and later requests wait meanwhile, so every answer is of one checkpoint.
"""

import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from areal_lite.config import stored_settings
from areal_lite.data.model_folder import check_model_folder
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.launch.preflight import check_model, check_servers
from areal_lite.launch.server_pool import ServerPool, ServerProcess
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, CONFIG_FILE, LOGS_DIR
from areal_lite.run_dir.resume import checkpoint_steps
from areal_lite.servers.blocking import post
from areal_lite.servers.client import ServerError
from areal_lite.servers.registry import announced_servers
from areal_lite.system.gpus import gpu_environment, resolve_device, visible_gpus
from areal_lite.system.network import LOOPBACK, listen_address
from areal_lite.system.processes import visible
from areal_lite.tools.commands import ServeConfig, existing_run
from areal_lite.tools.evaluate import marks_turns
from areal_lite.tools.export import export_folder, model_of_step, newest_step
from areal_lite.weights.recipients import FROM_DISK

_SERVER = "server-0"
_LOOK_EVERY_S = 1.0
# How long the answers in progress and the loading of new weights may take.
_LOAD_TIMEOUT_S = 3600.0
_RESTARTS = 5


def check(config: ServeConfig) -> None:
    """Check the model or the run, the address and the machine. Raises ValueError."""
    run_dir, server = _run_of(config), config.server
    if run_dir is None:
        check_model("model", config.model)
    if config.follow and run_dir is None:
        raise ValueError(f"follow=true, but model={config.model} is no run: give a run directory")
    if server.count != 1:
        raise ValueError(f"server.count={server.count}: an endpoint is one server, leave it at 1")
    if server.api_key and any(server.api_key in word for word in sys.argv):
        raise ValueError(
            "server.api_key is in the command line, which every user of this machine can read: put "
            "the key into an environment variable NAME, and write server.api_key='${oc.env:NAME}'"
        )
    check_servers(server, None if run_dir else config.model)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((listen_address(server.host), config.port))
        except (OSError, UnicodeError) as error:
            where = f"server.host={server.host} port={config.port}"
            raise ValueError(f"{where}: {error}; choose other ones") from error


def run(config: ServeConfig) -> int:
    """Serve until Ctrl-C. Raises RuntimeError or TimeoutError when the server is given up."""
    with tempfile.TemporaryDirectory(prefix="areal_lite-serve-") as scratch:
        endpoint = Endpoint(config, Path(scratch))
        try:
            with ServerPool(Path(scratch), {_SERVER: endpoint.make_server}, _RESTARTS) as pool:
                _say(f"waiting for the server, which loads {endpoint.what}; log: {endpoint.log}")
                pool.wait_ready()
                endpoint.introduce()
                while True:
                    pool.check()
                    if config.follow:
                        endpoint.follow()
                    time.sleep(_LOOK_EVERY_S)
        finally:
            endpoint.remove_exports()


class Endpoint:
    """A server of a model, or of a run's checkpoints: `folder` has the weights of `step`."""

    def __init__(self, config: ServeConfig, scratch: Path):
        """Find the weights. A followed run without a checkpoint has those that it started from."""
        self._config = config
        self._run_dir = _run_of(config)
        self._scratch = scratch
        self.log = scratch / LOGS_DIR / f"{_SERVER}.log"
        self.log.parent.mkdir()
        self._name = config.server.args.get("served_model_name", Path(config.model).resolve().name)
        device = resolve_device(config.server.device)
        # An export hides the GPUs from this process, and the server may start again meanwhile.
        address = listen_address(config.server.host)
        self._server = replace(config.server, device=device, host=address)
        self._environment = gpu_environment(visible_gpus() if device == "cuda" else [])
        if address in LOOPBACK:
            self._environment["GLOO_SOCKET_IFNAME"] = "lo"
        self._exported: set[Path] = set()  # with `follow`, and removed in the end
        self._seen = self._newest_listed()
        self.step, self.folder = 0, Path(config.model)
        if self._run_dir and config.follow and not self._seen:
            self.folder = Path(stored_settings(self._run_dir)["model"])
        elif self._run_dir:
            self.step, self.folder = self._newest(self._run_dir)
        check_model_folder(self.folder)

    @property
    def what(self) -> str:
        """Name what is served."""
        return f"step {self.step} of {self._run_dir}" if self._run_dir else str(self.folder)

    def make_server(self) -> ServerProcess:
        """Make the next process of the server."""
        names = {"served_model_name": self._name, "weight_version": str(self.step)}
        args = {"skip_tokenizer_init": False, **names, **self._server.args}
        return ServerProcess(
            replace(self._server, args=args),
            str(self.folder),
            name=_SERVER,
            port=self._config.port,
            seed=self._config.seed,
            log_path=self.log,
            environment=self._environment,
        )

    def introduce(self) -> None:
        """Print the URL, and a command that asks the model."""
        url = self.make_server().url
        body: dict = {"model": self._name, "max_tokens": 50}
        if marks_turns(Tokenizer(self.folder)):
            route, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello"}]
        else:
            route, body["prompt"] = "completions", "Hello"
        key = ' -H "Authorization: Bearer $KEY"' if self._server.api_key else ""
        print(f"{url}/v1 serves {self.what} as model {self._name}; Ctrl-C ends it. Example:")
        asked = f"-d {shlex.quote(json.dumps(body))}"
        kind = "-H 'Content-Type: application/json'"
        print(f"curl {url}/v1/{route} {kind}{key} {asked}", flush=True)

    def follow(self) -> None:
        """Load the run's newest checkpoint, if it is newer than the weights of the server."""
        servers = announced_servers(self._scratch)  # none while it starts again
        if not (self._run_dir and servers and (listed := self._newest_listed()) > self._seen):
            return
        self._seen = listed
        try:
            step, folder = self._newest(self._run_dir)
            if step > self.step:
                _say(f"step {step}: loading it once the answers in progress have ended")
                body = {"model_path": str(folder), "weight_version": str(step)}
                post(servers[0], FROM_DISK, body, _LOAD_TIMEOUT_S)
                self.step, self.folder = step, folder
                _say(f"serving {self.what}")
        except (ServerError, ValueError, OSError) as error:
            _say(f"step {self.step} stays until the next checkpoint: {error}")
        self.remove_exports(keep=self.folder)

    def remove_exports(self, keep: Path | None = None) -> None:
        """Remove the folders that were exported to follow the run, except `keep`."""
        for folder in self._exported - {keep}:
            shutil.rmtree(folder, ignore_errors=True)
        self._exported &= {keep}

    def _newest_listed(self) -> int:
        """Return the step of the run's newest checkpoint, whole or damaged; 0 without one."""
        steps = checkpoint_steps(self._run_dir / CHECKPOINTS_DIR) if self._run_dir else []
        return max(steps, default=0)

    def _newest(self, run_dir: Path) -> tuple[int, Path]:
        """Return the step of the newest whole checkpoint and a folder with its weights."""
        step = newest_step(run_dir)
        exported = export_folder(run_dir, step)
        is_there = exported.exists()
        folder = model_of_step(run_dir, step)
        if self._config.follow and folder == exported and not is_there:
            self._exported.add(folder)
        return step, folder


def _run_of(config: ServeConfig) -> Path | None:
    """Return the run directory, if `model` is one. Raises ValueError."""
    folder = Path(config.model)  # it may be impossible, such as too long
    return existing_run(folder) if os.path.isfile(folder / CONFIG_FILE) else None


def _say(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)
